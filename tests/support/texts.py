"""Text that tokenizers get wrong: contractions, spaces, scripts, combining marks, emoji, code, numbers."""

TEXTS = [
    "Hello, world! It's what they'll say we've done; I'm sure you'd agree.",
    "  leading, double  and trailing spaces   \n\n\ttabs\r\nand lines\n",
    "naïve café, Straße, 日本語のテキスト, العربية, हिन्दी, ไทย, e\u0301",
    "emoji 😀 👩\u200d👩\u200d👧 🇫🇷 \U0001f44d\U0001f3fd",
    "def f(x: int) -> str:\n    return {'a': [x, 22, 333]}.get(\"a\")  # π ≈ 3.14159\n",
    "1234567890 1,000,000.50 v2.0.1 x86_64",
    "fractions ½ and powers m² of one token each",
    "",
]
