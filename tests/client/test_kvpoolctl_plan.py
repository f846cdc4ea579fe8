"""kvpoolctl plan ...: the sliding windows and the mirror order, against lists of tokens. None of it needs a daemon."""
import re
import shutil
import subprocess

import numpy as np
import pytest

from support import golden
from test_kvpoolctl import COMPLETION, SECONDS_MAX, Tool, completions, environment, program

ZSH_COMPLETION = COMPLETION.with_name("_kvpoolctl")
COMMANDS = ["plan swa", "plan store", "plan pivots", "plan decode", "plan mirror"]


@pytest.fixture
def tool(tmp_path):
    return Tool(tmp_path / "none.sock")


def case(name):
    """Parameters and arrays of a golden plan."""
    params, arrays = {}, {}
    folder = golden.ROOT / name
    for line in (folder / "case.txt").read_text().splitlines():
        kind, key, *rest = line.split()
        if kind == "param":
            params[key] = rest[0]
        else:
            shape = [int(n) for n in rest[1].split("x")]
            arrays[key] = np.fromfile(folder / f"{key}.bin", "<i4").reshape(shape)
    return params, arrays


def sequences(rows):
    """[state_id, seqlen_k, seqlen_q, swa_valid_start] as options."""
    return [word for state, k, q, start in rows for word in ("--sequence", f"{k},{q},{state},{start}")]


def table(text):
    """The rows below the heading, up to a line that is no row of it."""
    lines = text.splitlines()
    heading = re.split(r"  +", lines[0].strip())
    rows = []
    for line in lines[1:]:
        cells = re.split(r"  +", line.strip())
        if len(cells) != len(heading):
            break
        rows.append(dict(zip(heading, cells)))
    return rows


def interval(cell):
    """"3-7" as a range; anything else is empty."""
    match = re.fullmatch(r"(\d+)-(\d+)", cell)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


# ---- golden plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan_swa_w40_r64", "plan_swa_w64_r64", "plan_swa_w64_r96", "plan_walkthrough_swa"])
def test_swa_is_the_golden_one(tool, name):
    params, arrays = case(name)
    document = tool.json("plan", "swa", *sequences(arrays["seqs"]), "--window", params["window"], "--ring",
                         params["ring_tokens"])
    assert np.array_equal(document["segments"], arrays["out"])
    assert document["total_k"] == int(params["total_k"])


@pytest.mark.parametrize("name", ["swa_store_slots_r64", "swa_store_slots_r4096"])
def test_store_is_the_golden_one(tool, name):
    params, arrays = case(name)
    document = tool.json("plan", "store", *sequences(arrays["seqs"]), "--ring", params["ring_tokens"])
    assert np.array_equal(document["slots"], arrays["out"])


@pytest.mark.parametrize("name", ["plan_swa_pivots_w40", "plan_swa_pivots_w64"])
def test_pivots_are_the_golden_ones(tool, name):
    params, arrays = case(name)
    document = tool.json("plan", "pivots", *sequences(arrays["seqs"]), "--window", params["window"])
    assert np.array_equal(document["pivots"], arrays["out"])


@pytest.mark.parametrize("name", ["plan_swa_decode_w40", "plan_swa_decode_w64"])
def test_decode_is_the_golden_one(tool, name):
    params, arrays = case(name)
    document = tool.json("plan", "decode", *sequences(arrays["seqs"]), "--window", params["window"], "--ring",
                         params["ring_tokens"])
    assert np.array_equal(document["offset_len"], arrays["out"])


# ---- what people read ----------------------------------------------------------------------------------------------


def test_swa_table(tool):
    text = tool.run("plan", "swa", "--sequence", "10000,1024", "--sequence", "5,5", "--window", 4096, "--ring",
                    4096).stdout
    assert [(r["BLOCK"], r["BEGIN"], r["END"], r["ROWS"], r["DESTINATION"]) for r in table(text)] == [
        ("0", "784", "4096", "3312", "0-3311"), ("0", "0", "784", "784", "3312-4095"),
        ("zero rows", "0", "4096", "4096", "4096-8191")]
    assert text.splitlines()[-1] == "3 segments, total_k 8192"


def test_store_table_has_every_slot_once(tool):
    arguments = ["plan", "store", "--sequence", "1000,300", "--sequence", "3,0", "--sequence", "10000,40,5", "--ring",
                 64]
    slots = tool.json(*arguments)["slots"]
    rows = table(tool.run(*arguments).stdout)
    told = []
    for row in rows:
        told += list(interval(row["SLOTS"])) or [-1] * int(row["ROWS"])
    assert told == slots and slots.count(-1) == 236
    assert [int(r["SEQUENCE"]) for r in rows] == [0, 0, 0, 2, 2]
    tokens = [t for r in rows for t in interval(r["TOKENS"])]
    assert tokens == [*range(700, 1000), *range(9960, 10000)]


def test_pivots_and_decode_tables(tool):
    batch = ["--sequence", "9,1", "--sequence", "200,7,1,150", "--window", 40]
    rows = table(tool.run("plan", "pivots", *batch).stdout)
    assert [[int(r["SEQUENCE"]), int(r["POSITION"]), int(r["KEYS"])] for r in rows] == \
        [[0, 8, 9]] + [[1, p, 40] for p in range(193, 200)]
    for row, (offset1, len1, offset2, len2) in zip(rows, tool.json("plan", "pivots", *batch)["pivots"]):
        assert interval(row["HISTORY COLUMNS"]) == range(offset1, offset1 + len1)
        assert interval(row["CHUNK COLUMNS"]) == range(offset2, offset2 + len2)
    assert table(tool.run("plan", "pivots", "--sequence", "1,1", "--window", 4).stdout)[0]["HISTORY COLUMNS"] == "-"
    rows = table(tool.run("plan", "decode", *batch, "--ring", 64).stdout)
    windows = tool.json("plan", "decode", *batch, "--ring", 64)["offset_len"]
    assert [[int(r["START SLOT"]), int(r["VALID LENGTH"])] for r in rows] == windows
    assert [int(r["POSITION"]) for r in rows] == [8, *range(193, 200)]


def test_state_ids_are_the_sequences_numbers_by_default(tool):
    given = tool.json("plan", "store", "--sequence", "9,2,0", "--sequence", "9,2,1,4", "--ring", 16)
    assert tool.json("plan", "store", "--sequence", "9,2", "--sequence", "9,2", "--ring", 16) == given


def test_mirror_against_lists(tool):
    rng = np.random.default_rng(3)
    for _ in range(10):
        ranks = int(rng.integers(1, 6))
        chunks = [int(n) for n in rng.integers(0, 50, rng.integers(1, 4))]
        arguments = ["plan", "mirror", *[word for n in chunks for word in ("--chunk", n)], "--ranks", ranks]
        held = [[] for _ in range(ranks)]
        first = 0
        for tokens in chunks:
            padded = list(range(first, first + tokens)) + [-1] * (-tokens % (2 * ranks))
            for rank, pieces in enumerate(np.array_split(padded, 2 * ranks)[:ranks]):
                mirrored = np.array_split(padded, 2 * ranks)[2 * ranks - 1 - rank]
                held[rank] += [int(t) for t in [*pieces, *mirrored]]
            first += tokens
        document = tool.json(*arguments)
        assert document["local"] == held
        gathered = [token for rank in held for token in rank]
        assert [gathered[row] for row in document["reverse"]] == list(range(first))
        if first == 0:
            continue
        local, reverse, last = re.fullmatch(r"(.*\n)\n(.*\n)([^\n]+)\n", tool.run(*arguments).stdout, re.S).groups()
        told = [[] for _ in range(ranks)]
        for row in table(local):
            told[int(row["RANK"])] += list(interval(row["CHUNK ROWS"])) or [-1] * int(row["ROWS"])
        assert told == held
        assert [g for row in table(reverse) for g in interval(row["GATHERED ROWS"])] == document["reverse"]
        assert last == (f"{first} row{'s' * (first != 1)}, {len(held[0])} on each of {ranks} "
                        f"rank{'s' * (ranks != 1)}")


# ---- command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (["swa", "--sequence", "10,1", "--ring", "16"], "--sequence, --window and --ring are needed"),
    (["swa", "--sequence", "10,1", "--window", "16"], "--sequence, --window and --ring are needed"),
    (["swa", "--window", "8", "--ring", "16"], "--sequence, --window and --ring are needed"),
    (["swa", "--sequence", "10", "--window", "8", "--ring", "16"], "seqlen_k,seqlen_q[,state_id[,swa_valid_start]]"),
    (["swa", "--sequence", "10,1,2,3,4", "--window", "8", "--ring", "16"], "seqlen_k,seqlen_q"),
    (["swa", "--sequence", "10,1,,3", "--window", "8", "--ring", "16"], "--sequence 10,1,,3: state_id ''"),
    (["swa", "--sequence", "10,1,2147483648", "--window", "8", "--ring", "16"],
     "--sequence 10,1,2147483648: state_id '2147483648': a number of at most 2147483647 is wanted"),
    (["swa", "--sequence", "10,1", "--window", "-8", "--ring", "16"], "--window -8"),
    (["store", "--sequence", "10,1"], "--sequence and --ring are needed"),
    (["store", "--sequence", "10,1", "--ring", "2147483648"], "--ring 2147483648"),
    (["store", "--sequence", "10,1", "--ring", "16", "--window", "3"], "option '--window'"),
    (["pivots", "--sequence", "10,1"], "--sequence and --window are needed"),
    (["pivots", "--sequence", "10,1", "--window", "3", "--ring", "16"], "option '--ring'"),
    (["decode", "--sequence", "10,1", "--window", "8"], "--sequence, --window and --ring are needed"),
    (["mirror", "--chunk", "10"], "--chunk and --ranks are needed"),
    (["mirror", "--ranks", "2"], "--chunk and --ranks are needed"),
    (["mirror", "--ranks", "2", "--chunk", "ten"], "--chunk ten"),
])
def test_wrong_command_line(tool, arguments, words):
    text, hint = tool.refused("plan", *arguments, status=2)
    assert words in text
    assert f"plan {arguments[0]} --help" in hint


PAGED = {"--sequence": "seqlen_k,seqlen_q,BLOCKS", "--ratio": "4"}
RING = {"--sequence": "seqlen_k,seqlen_q,state_id,swa_valid_start"}
TOKENS = {"--tokens": "BEGIN-END", "--per-block": "16", "--table": "0-9"}
# Every argument of every command, as "name" of a part or a good value.
ARGUMENTS = {
    "range": {**TOKENS, "--destination": "7"},
    "slots": TOKENS,
    "new": PAGED,
    "compressed": {**PAGED, "--per-block": "16"},
    "visible": {**PAGED, "--per-block": "16"},
    "swa": {**RING, "--window": "8", "--ring": "16"},
    "store": {**RING, "--ring": "16"},
    "pivots": {**RING, "--window": "8"},
    "decode": {**RING, "--window": "8", "--ring": "16"},
    "mirror": {"--chunk": "10", "--ranks": "2"},
}
GOOD = {"seqlen_k": "20", "seqlen_q": "3", "BLOCKS": "0-9", "state_id": "1", "swa_valid_start": "0", "BEGIN": "0",
        "END": "40"}
ZERO_IS_GOOD = {"--destination", "--chunk", *GOOD}


def filled(value, **parts):
    for name, good in {**GOOD, **parts}.items():
        value = value.replace(name, parts.get(name, good))
    return value


def line_of(command, **changed):
    """The command's line, all arguments good but for those changed: a value, or a part of one."""
    words = ["plan", command]
    for option, value in ARGUMENTS[command].items():
        key = option[2:].replace("-", "_")
        words += [option, filled(changed[key] if key in changed else value,
                                 **{part: text for part, text in changed.items() if part in GOOD})]
    return words


BAD = ["-7", "", "x", "7x", "99999999999999999999"]


def wrong_values():
    for command, options in ARGUMENTS.items():
        for option, value in options.items():
            parts = [part for part in GOOD if part in value]
            for name in parts or [option]:
                for bad in BAD + ([] if name in ZERO_IS_GOOD or name == "--table" else ["0"]):
                    yield pytest.param(command, option, name, bad, id=f"{command} {option} {name} {bad!r}")


def test_every_command_and_option_is_in_the_table(tool):
    told = re.findall(r"^ +plan (\w+) ", tool.run("--help").stdout, re.M)
    assert sorted(told) == sorted(ARGUMENTS)
    for command, options in ARGUMENTS.items():
        known = set(re.findall(r"^ +(?:-\w, +)?(--[\w-]+)", tool.run("plan", command, "--help").stdout, re.M))
        assert known - {"--help", "--usage", "--json", "--socket", "--timeout", "--version"} == set(options)
        tool.run(*line_of(command))


@pytest.mark.parametrize("command, option, name, bad", wrong_values())
def test_a_wrong_value_is_named(tool, command, option, name, bad):
    """Whatever is refused, the text has the option, the value that was given to it, and which of its parts it was."""
    line = line_of(command, **{name if name in GOOD else option[2:].replace("-", "_"): bad})
    given = line[line.index(option) + 1]
    text, hint = tool.refused(*line, status=2)
    assert f"plan {command} --help" in hint
    if given == "":
        assert f"{option}: its value is empty" in text
        return
    assert f"{option} {given}: " in text, text
    if name in GOOD and name not in ("BEGIN", "END", "BLOCKS"):
        assert f"{name} '{bad}': a number of at most" in text, text
    if name == "BLOCKS":
        assert f"block table '{bad}': " in text, text


@pytest.mark.parametrize("arguments, words", [
    (["slots", "--tokens", "0-99999999999", "--per-block", "1"], "--tokens: END 99999999999 is more than"),
    (["compressed", "--sequence", "99999999999,1", "--per-block", "1"], "sequence 0: seqlen_k = 99999999999: "),
    (["visible", "--sequence", "9,9", "--sequence", "99999999,99999999"], "sequence 1: seqlen_q = 99999999: more"),
    (["swa", "--sequence", "10,11", "--window", "8", "--ring", "16"], "sequence 0: seqlen_q = 11"),
    (["swa", "--sequence", "10,1", "--window", "17", "--ring", "16"], "window = 17 is larger than the ring of 16"),
    (["swa", "--sequence", "10,1,134217728", "--window", "8", "--ring", "16"], "2147483663 passes 2^31 - 1"),
    (["store", "--sequence", "3,3", "--sequence", "10,11", "--ring", "16"], "sequence 1: seqlen_q = 11"),
    (["store", "--sequence", "99999999,99999999", "--ring", "16"], "99999999 rows; this program plans for at most"),
    (["pivots", "--sequence", "10,1", "--sequence", "10,1", "--window", "2147483647"], "pass 2^31 - 1"),
    (["pivots", "--sequence", "99999999,99999999", "--window", "16"], "99999999 rows"),
    (["decode", "--sequence", "41,26", "--window", "40", "--ring", "64"], "seqlen_q = 26 new tokens"),
    (["mirror", "--chunk", "2147483647", "--ranks", "2"], "seqlen_q = 2147483647 padded for 2 ranks"),
    (["mirror", "--chunk", "1", "--ranks", "100000000"], "2 rows on each of 100000000 ranks"),
    (["mirror", "--chunk", "0", "--ranks", "100000000"], "0 rows on each of 100000000 ranks"),
])
def test_refused(tool, arguments, words):
    assert words in tool.refused("plan", *arguments)[0]
    error = tool.json("plan", *arguments, status=1)["error"]
    assert words in error["text"]


def test_more_sequences_than_the_program_takes(tool):
    many = ["--sequence", "9,1"] * 1025
    assert "--sequence 9,1: more than 1024 sequences" in tool.refused("plan", "store", *many, "--ring", 16, status=2)[0]
    assert len(tool.json("plan", "store", *many[2:], "--ring", 16)["slots"]) == 1024
    many = ["--chunk", 1] * 1025
    assert "--chunk 1: more than 1024 chunks" in tool.refused("plan", "mirror", *many, "--ranks", 1, status=2)[0]


def test_the_largest_destinations_are_printed(tool):
    text = tool.run("plan", "range", "--tokens", "100-110", "--per-block", 128, "--destination", 2147483637).stdout
    assert table(text)[0]["DESTINATION"] == "2147483637-2147483646"


def test_the_examples_of_help_run(tool):
    for command in COMMANDS:
        text = tool.run(*command.split(), "--help").stdout.split("Examples:")[1].replace("\\\n", " ")
        examples = [line.removeprefix("  kvpoolctl ") for line in text.strip("\n").split("\n")]
        assert len(examples) == 2
        for example in examples:
            assert tool.run(*example.split()).stdout


# ---- completion ----------------------------------------------------------------------------------------------------


def zsh_completions(*words):
    """What _kvpoolctl offers for the last word, with zsh's own functions replaced by ones that print."""
    script = ('path=($1:h $path); shift; completion=$1; shift; words=("$@"); CURRENT=$#; '
              'compadd() { [[ $1 == -- ]] && shift; (( $# == 0 )) || print -l -- "$@" }; _files() { print FILES }; '
              '_call_program() { shift; "$@" }; source $completion')
    done = subprocess.run(["zsh", "-f", "-c", script, "zsh", program(), str(ZSH_COMPLETION), "kvpoolctl", *words],
                          capture_output=True, text=True, env=environment(), check=True, timeout=SECONDS_MAX)
    assert done.stderr == ""
    return sorted(word for word in done.stdout.split() if word.startswith(words[-1]))


def bash_completions(*words):
    return completions(Tool("none.sock"), *words)


@pytest.mark.parametrize("complete", [
    bash_completions,
    pytest.param(zsh_completions, marks=pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not there")),
])
def test_completion(complete):
    assert complete("plan", "") == sorted(["range", "slots", "new", "compressed", "visible", "swa", "store", "pivots",
                                           "decode", "mirror"])
    assert complete("plan", "s") == ["slots", "store", "swa"]
    assert complete("plan", "swa", "--") == ["--help", "--json", "--ring", "--sequence", "--socket", "--timeout",
                                             "--window"]
    assert complete("plan", "store", "--r") == ["--ring"]
    assert complete("plan", "pivots", "--w") == ["--window"]
    assert complete("plan", "decode", "--sequence", "9,1", "--r") == ["--ring"]
    assert complete("plan", "mirror", "--ch") == ["--chunk"]
    for option in ["--window", "--ring", "--chunk", "--ranks", "--sequence"]:
        assert complete("plan", "mirror", option, "") == []
