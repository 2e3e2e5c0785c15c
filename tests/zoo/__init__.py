"""What people bring: nets, data sets and options in many combinations, each compared with plain torch."""
