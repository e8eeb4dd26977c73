"""Message consumers on real brokers: a redelivered message is answered from its receipt."""
