"""What the user holds: the run, and everything a person sees of it."""
