"""Tables: rows of categorical and continuous columns with one number to predict.

csv_table.py is the dataset of any CSV file, and the one to read first. csv_file.py reads the
untrusted file, cells.py makes numbers of its words, and splits.py keeps rows back. An error names
file, row and column; rows are counted as a spreadsheet does, the header is row 1.
"""
