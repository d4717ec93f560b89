"""What numbers say: intervals, tests, the gate, and which agent is deployed."""
