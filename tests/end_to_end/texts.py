"""Texts of every kind that people send."""

import random

SENTENCES = (
    "the quick brown fox jumps over a lazy dog while seven wizards brew potions beneath an ancient oak "
    "and engineers measure latency percentiles of distributed systems every single rainy morning"
)
WORDS = SENTENCES.split()

API_KEY = "right"
"""What the shared servers ask for."""

A_FEW = ("A nursery owns its tasks.", "hello", "Bread needs flour, water, salt and a warm place to rise.", "東京 🚀")
QUERY = "Who owns a task?"
TOO_LONG = "the quick brown fox " * 500

SPECIMENS = [
    "", " ", "\n", "\t \n", ".", "a", "Z", "7", "hello", "?", "-", "...",
    "😀", "👩‍👩‍👧‍👦 family", "🏳️‍🌈🏴‍☠️", "I ❤️ embeddings 🚀🚀🚀", "👍🏽", "🇨🇭 🇯🇵",
    "人工智能正在改变世界", "東京は日本の首都です。", "안녕하세요 세계", "漢字かな交じり文", "中文 mixed with English",
    "مرحبا بالعالم", "שלום עולם", "السلام عليكم ورحمة الله", "\u202eright to left override", "فارسی and English",
    "\x01\x02\x03", "bell\x07 and\x1b[31m escape", "tab\tseparated\tvalues", "a\u200bzero\u200bwidth", "\x7fdelete",
    "Ünïcödé àccénts", "e\u0301 combining", "ﬁ ligature", "ＦＵＬＬＷＩＤＴＨ", "Ωmega ∑ ∞ ≠", "naïve café",
    "don't can't won't", "https://example.org/a?b=c&d=e#f", "def f(x): return x ** 2", '{"json": [1, 2, 3]}',
    "<html><body>&amp;</body></html>", "SELECT * FROM t WHERE a = 'b';", "C:\\Users\\nobody", "1234567890" * 20,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "UPPER CASE SHOUTING", "MiXeD cAsE", "नमस्ते दुनिया", "Привет, мир", "สวัสดีชาวโลก", "Γειά σου Κόσμε", "გამარჯობა",
]  # fmt: skip


def varied_texts() -> list[str]:
    """200 texts: the specimens, sentences of 1 to 200 words, and texts far longer than any model takes."""
    random.seed(7)
    texts = [*SPECIMENS]
    texts += [" ".join(random.choices(WORDS, k=2000)), "長い文章。" * 2000, "🚀" * 3000, "x" * 20_000, "word " * 5000]
    while len(texts) < 200:
        texts.append(" ".join(random.choices(WORDS, k=random.choice((1, 2, 5, 10, 20, 50, 100, 200)))))
    return texts
