"""Walk-forward evaluation: refit on a train span, act on the test span after it, fold by fold."""
