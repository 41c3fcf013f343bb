"""Mathematics that methods share: functions of tensors, without Flower and without clients."""
