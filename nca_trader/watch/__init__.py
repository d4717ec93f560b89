"""What people look at while a program runs."""
