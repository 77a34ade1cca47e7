"""A tokenizer for tests: one id per word or punctuation mark, and a BOS token."""

import re


class WordTokenizer:
    def __init__(self) -> None:
        self.words = ["<bos>"]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids = [0] if add_special else []
        for word in re.findall(r" ?\w+|[^\w ]", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def text(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids if i)
