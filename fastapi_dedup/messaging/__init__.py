"""The message doors: one handler wrapper over the core, and a thin module for each broker library."""
