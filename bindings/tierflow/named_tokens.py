"""Which token of a text begins at a character, without the characters of each token: telling these takes a sixth of a tokenizer's time. The program runs this
text as one with row_files.py and others."""
import bisect
import re


class NamedTokens:
    """Tokens that a byte-level tokenizer was given by name. They part a text before anything else happens, in the order in which they stand there. In what lies
    between, each other token stands for certain bytes: where a text begins with the tokens that its beginning has alone, the next one begins there."""

    def __init__(self, tokens):
        """tokens: their ids by name."""
        self.ids = tokens
        self.pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")  # as the tokenizer: the first, and of these the longest

    @classmethod
    def of(cls, tokenizer):
        """Those of a transformers tokenizer; None where tokens do not stand for certain bytes, or named ones do not part text as they are written."""
        from tokenizers.pre_tokenizers import ByteLevel

        backend, tokens = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder
        model, parts = backend.model, backend.pre_tokenizer
        ordinary = type(model).__name__ == "BPE" and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        # NFC puts characters together: were it done across the end of a beginning, the beginning would have other bytes alone.
        in_bytes = type(backend.normalizer).__name__ in ("NoneType", "NFC") and parts is not None and b'"ByteLevel"' in parts.__getstate__()
        plain = all(not (token.normalized or token.lstrip or token.rstrip or token.single_word) for token in tokens.values())
        if not (ordinary and in_bytes and plain and all(backend.token_to_id(symbol) is not None for symbol in ByteLevel.alphabet())):
            return None
        return cls({token.content: number for number, token in tokens.items()})

    def tokens_at(self, text, ids, cuts, encode):
        """For each of these characters the token that begins there, in order; None where that is not so, or not certain. ids: the text's. encode: the ids of a piece of it."""
        starts, ends, places, at = [0], [0], [0], 0
        last_cut = max(cuts, default=0)
        for found in self.pattern.finditer(text):
            if found.start() >= last_cut:
                break
            try:
                at = ids.index(self.ids[found[0]], at)
            except ValueError:
                return None
            starts.append(found.start())
            ends.append(found.end())
            places.append(at)
            at += 1
        tokens = []
        for cut in cuts:
            last = bisect.bisect_right(ends, cut) - 1
            alone = encode(text[starts[last] : cut])
            stop = places[last] + len(alone)
            if ids[places[last] : stop] != alone:
                return None
            tokens.append(stop)
        return tokens
