"""Prompt texts of about a given number of tokens, made of real words.

Comes after `lengths` and before `target`. Each word below, with a blank before it, is one token
of common byte-level BPE vocabularies (checked with SmolLM2's), so n words are about n tokens; what
the server counted (`usage.prompt_tokens`) is what the report shows. Pure.
"""

from __future__ import annotations

from keystage.loadgen import arrivals

_PROMPT_STREAM = 3

_TEXT = """
about above across after again against all also always among and another answer any are area around ask
away back bad base be because become been before began being below best better between big black blue
body book both bring brought build built business but buy by call came can care carry case cause center
change check child children city class clear close cold color come common company complete could country
course cover cross current cut data day days deep did different do does done door down draw drive during
each early earth east easy eat edge end energy enough even ever every example eye face fact fall family
far fast father feel feet few field figure fill final find fine fire first fish five floor follow food
for force form found four free friend from front full game garden gave general get give glass go gold
good got great green ground group grow half hand hard has have he head hear heart heat heavy help her
here high him his hold home hot hour house how human hundred idea if in inside into is island it its job
just keep kind king knew know land language large last late later law lay lead learn leave left less let
letter level life light like line list little live local long look lost lot love low machine made main
make man many map mark market matter may mean measure men might mile mind minute model money month moon
more morning most mother mountain move much music must name nation near need never new next night no
north not note nothing notice now number object ocean of off often oil old on once one only open or order
other our out over own page paper part party pass past path pattern people person picture piece place
plan plane plant play point poor power present press problem process produce product public pull question
quick rain ran reach read ready real reason record red rest result right river road rock room round rule
run same sat say school science sea second see seem self sense sentence serve set seven several shape she
ship short should show side simple since six size sky sleep slow small snow so some song soon sound south
space special stand star start state step still stone stop story street strong study such summer sun
system table take talk ten test than that the their them then there these they thing think this those
though thought thousand three through time to today together told too took top town travel tree true try
turn two under unit until up us use value very voice wait walk wall want war warm was watch water way we
week well went were west what wheel when where which while white who whole why wide will wind winter with
without woman wonder wood word work world would write year yes yet you young your
"""

WORDS = tuple(_TEXT.split())


def text(tokens: int, seed: int, index: int) -> str:
    """Writes a prompt of `tokens` words; the same (seed, index) gives the same words."""
    source = arrivals.stream(seed, _PROMPT_STREAM + index)
    return " ".join(WORDS[i] for i in source.randint(0, len(WORDS), size=tokens))


def payload(size_bytes: int, seed: int, index: int) -> bytes:
    """Random bytes for a single-pass request; the same (seed, index) gives the same bytes."""
    return arrivals.stream(seed, _PROMPT_STREAM + index).bytes(size_bytes)
