"""Contract of the ops: argument and result types, and the abstract op families."""
