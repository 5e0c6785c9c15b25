"""What a state is: taken from objects and given back, as bytes, compared, per rank, and what it does not hold."""
