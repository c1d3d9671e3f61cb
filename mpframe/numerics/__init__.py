"""What precision does to your numbers: ranges, autopsy, search, doctor."""
