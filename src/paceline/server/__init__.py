"""The parameter server: shards of the parameters, and those who serve and use them."""
