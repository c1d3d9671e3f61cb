"""Which format each op and each weight has, and how an op is run in it."""
