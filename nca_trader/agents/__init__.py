"""What decides: policies that learn, and rules that they are compared with."""
