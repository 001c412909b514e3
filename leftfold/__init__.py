"""The front door of Leftfold."""
