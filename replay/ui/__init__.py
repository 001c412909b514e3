"""The debugger: a log as a page in which time can be travelled, served by the standard library."""
