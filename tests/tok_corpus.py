"""Texts for the tokenizer's tests: deterministic, in many scripts, with what tokenizers get wrong."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator

# Article 1 of the Universal Declaration of Human Rights, or words near it, in scripts that split differently.
PROSE = [
    "All human beings are born free and equal in dignity and rights. They're endowed with reason and conscience.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits; l'homme n'est-il pas né ainsi ?",
    "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وقد وهبوا عقلًا وضميرًا.",
    "כָּל בְּנֵי הָאָדָם נוֹלְדוּ בְּנֵי חוֹרִין וְשָׁוִים בְּעֶרְכָּם וּבִזְכֻיּוֹתֵיהֶם.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。コーヒー・カップ゠ー",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "எல்லா மனிதர்களும் சுதந்திரமாகப் பிறந்தவர்கள்; மதிப்பு, உரிமைகளில் சமமானவர்கள்.",
]
CODE = [
    'int main(int argc, char **argv) {\n\tfor (size_t i = 0; i < n; i++)\n\t\tprintf("%d\\n", a[i] += 0x7f);\n}\n',
    "def f(x: list[int]) -> dict[str, Any]:\n    return {k: v for k, v in zip('abc', x)}  # it's fine\n\n\n",
    "SELECT * FROM t WHERE a.b = 'c' AND d<>e OR f IS NOT NULL;--x\r\n",
    '{"a":[1,2.5e-10,null,true],"b":{"c":"\\u00e9"}}\n<a href="https://x.org/?q=1&r=2#z">y</a>\n',
    "$ git log --oneline | head -n 5 && echo ${HOME}/.x_y-z ~ `pwd`\n",
    "\\frac{\\partial f}{\\partial x_1} \\leq \\sum_{i=0}^{n-1} \\alpha_i^2 + #tag @name C++ C# a_b_c __init__\n",
]
EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☕", "1️⃣", "🧑🏿‍🚀", "™", "©️", "♀", "\u200d", "\ufe0f"]
SPACE = list(" \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2003\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff")
MARKS = list("\u0301\u0308\u20dd\u0e31\u093f\u0e4d\u3099\u309a\ufe0f")
DIGITS = [*"0123456789", "٣", "४", "৭", "Ⅷ", "½", "²", "①", "〇", "一", "𝟜", "٪"]
SIGNS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + list("«»“”‘’—…、。「」·¿€£¥±×÷≠∞→│█゠・ー゛゜")
CONTROLS = [*map(chr, range(32)), *"\x7f\x80\x9f\u00ad\u061c\u2066\ue000\uffff\U000e0041\U0010ffff"]
ENGLISH = ["the", "of", "and", "it's", "I'm", "don't", "we've", "THE", "HTTPServer", "camelCase", "naïve", "co-op", "e.g.", "U.S.A."]


def texts(seed: int, count: int) -> Iterator[str]:
    """count short texts, each a run of pieces of one or several kinds."""
    rng = random.Random(seed)

    def part(of: list[str]) -> str:
        text = rng.choice(of)
        at = rng.randrange(len(text))
        return text[at : at + rng.randrange(1, 30)]

    def some(of: list[str], most: int) -> str:
        return "".join(rng.choice(of) for _ in range(rng.randrange(1, most)))

    def anything() -> str:
        first, last = rng.choice([(0x20, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000)])
        return "".join(chr(rng.randrange(first, last)) for _ in range(rng.randrange(1, 8)))

    kinds = [SPACE, SIGNS, DIGITS, ["a", "Z", "é", "中", "の", "ก", "😀", "\x00"]]
    makers: list[Callable[[], str]] = [
        lambda: part(PROSE), lambda: part(CODE), anything, lambda: rng.choice(rng.choice(kinds)) * rng.randrange(1, 20),
        lambda: some(SPACE, 6), lambda: some(DIGITS, 9), lambda: some(SIGNS, 5), lambda: some(EMOJI, 4),
        lambda: some(CONTROLS, 4), lambda: some(MARKS, 3), lambda: some(["\r", "\n", " ", "\r\n"], 6),
        lambda: rng.choice(["", " "]) + rng.choice(ENGLISH), lambda: rng.choice(["'", "’"]) + rng.choice(["s", "t", "re", "LL", "é"]),
    ]  # fmt: skip
    for _ in range(count):
        if rng.random() < 0.2:
            yield rng.choice(makers)() * rng.randrange(1, 4)
        else:
            yield "".join(rng.choice(makers)() for _ in range(rng.randrange(1, 9)))


def every_code_point() -> Iterator[str]:
    """Every assigned code point, and a sample of the unassigned, private and huge blocks, each in several neighbourhoods."""
    contexts = ["{0}", " {0}", "a{0}b", "{0}{0}\n", "1{0}2", ".{0}", "  {0}  ", "中{0}", "\n{0}"]
    batch: list[str] = []
    for c in range(0x110000):
        kind = unicodedata.category(chr(c)) if not 0xD800 <= c < 0xE000 else "Cs"
        if kind == "Cs" or (kind in ("Cn", "Co", "Lo") and c > 0x3400 and c % 61):
            continue
        batch.append(contexts[c % len(contexts)].format(chr(c)) + contexts[c // 7 % len(contexts)].format(chr(c)))
        if len(batch) == 32:
            yield "".join(batch)
            batch.clear()
    yield "".join(batch)


def broken_utf8(seed: int, count: int) -> Iterator[bytes]:
    """Byte strings that are mostly text, with bytes inserted, dropped and changed."""
    rng = random.Random(seed)
    odd = [
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe4\xb8",
        b"\x80",
        b"\xf0\x9f\x98",
        b"\xc3",
        b"\xf8\x88\x80\x80\x80",
    ]
    for text in texts(seed, count):
        data = bytearray(text.encode())
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data) + 1)
            what = rng.randrange(3)
            if what == 0:
                data[at:at] = rng.choice(odd)
            elif what == 1:
                del data[at : at + 1]
            elif at < len(data):
                data[at] = rng.randrange(256)
        yield bytes(data)
