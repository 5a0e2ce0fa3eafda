"""What tests share; rank processes import it, so nothing here may need pytest's own state."""
