"""What a proposer would have gained: recorded outputs are said again, and only the guessing is real."""
