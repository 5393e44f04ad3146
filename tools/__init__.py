"""Tools of the project itself: metrics of its code, pictures, and RLlib's tests on it."""
