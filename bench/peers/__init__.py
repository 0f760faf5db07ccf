"""Workers of peers that live in environments of their own; they import only numpy and the peer."""
