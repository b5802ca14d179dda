"""What fits on which devices, and what speculation would cost and gain there: answered before anything is loaded."""
