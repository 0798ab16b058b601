"""Estimate pi from random points in a PostgreSQL database, and write the result to result.json."""

import json
import random
from pathlib import Path

import psycopg

POINTS = 20_000
COUNT = "SELECT count(*), 4.0 * count(*) FILTER (WHERE x*x + y*y < 1) / count(*) FROM points"

numbers = random.Random(41)  # the same points in each run
with psycopg.connect() as database, database.cursor() as cursor:  # reads PGHOST and others
    cursor.execute("CREATE TABLE points (x float8, y float8)")
    with cursor.copy("COPY points FROM STDIN") as copy:
        for _ in range(POINTS):
            copy.write_row((numbers.random(), numbers.random()))
    points, pi = cursor.execute(COUNT).fetchone()
Path("result.json").write_text(json.dumps({"points": points, "pi": float(pi)}) + "\n")
print(f"pi is about {pi:.3f}, from {points} points")
