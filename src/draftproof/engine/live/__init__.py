"""Operations on a running engine: weight updates, sleep and wake-up."""
