"""Tables: rows of categorical and continuous columns with one number to predict."""
