"""Draft head as it is trained: module, attention, loss, target model."""
