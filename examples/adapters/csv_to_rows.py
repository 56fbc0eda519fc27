"""Data of one's own: a table becomes conversations. csv_to_rows.py TABLE.csv ROWS.jsonl. The table has the columns quantity, thing and unit."""

import csv
import json
import sys


def conversation(row):
    question = f"Which unit does the {row['quantity']} of the {row['thing']} have?"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"In {row['unit']}."}]}


with open(sys.argv[1], newline="") as table, open(sys.argv[2], "w") as rows:
    for row in csv.DictReader(table):
        rows.write(json.dumps(conversation(row)) + "\n")
