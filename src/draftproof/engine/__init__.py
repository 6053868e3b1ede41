"""The engine: decides and commits; computes nothing itself."""
