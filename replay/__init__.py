"""Replay: fold a log (`replay.fold`), verify it by deciding anew (`replay.verify`), look into it (`replay.show`)."""
