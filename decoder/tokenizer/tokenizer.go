// Package tokenizer turns texts into ids of tokens and back, as the programs do that models are trained with.
//
// [Load] reads a folder. The first of these forms that is there counts:
//
//	tokenizer.json                        Hugging Face's tokenizers
//	vocab.json and merges.txt             GPT-2 and OPT
//	tekken.json, tekken_240911.json       Mistral's tekken
//	tokenizer.model, tokenizer.model.v3   SentencePiece
//
// [NewGGUF] takes the vocabulary of a GGUF file.
//
// A text is searched for added tokens. What lies between them is normalized, searched for added tokens that are
// normalized, and cut into words. A model turns each word into tokens:
//
//   - BPE on bytes: neighbouring symbols are merged, the pair that stands first among the merges first (GPT-2, Llama 3,
//     Qwen, DeepSeek, gpt-oss), or the pair whose text has the lowest number first (tekken).
//   - BPE on characters, with tokens for bytes of the others (Llama 2, Gemma), by merges or by scores.
//   - Unigram: the tokens with the largest sum of scores (T5, XLM-R).
//   - WordPiece, of GGUF files alone: the longest tokens from left to right (BERT).
//
// A text that contains the name of a special token, say "</s>", is spelled out: a prompt cannot smuggle in an end of
// text. [Options] makes it the token, as transformers does.
//
// # What is refused
//
// What is read gives the ids that the format's own program gives, or it is an error that names the key and its value:
// ErrFormat for files that contradict themselves, each other or their format, ErrUnsupported for sound files with
// something else in them. Of tokenizer.json these are read:
//
//	model            BPE and Unigram, without dropout and affixes of words
//	normalizer       Lowercase, NFC, NFD, NFKC, NFKD, Precompiled, Prepend, Replace, Sequence, Strip, StripAccents
//	pre_tokenizer    ByteLevel, Digits, Metaspace, Punctuation, Sequence, Split, WhitespaceSplit
//	post_processor   ByteLevel, Sequence, TemplateProcessing
//	decoder          ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip
//
// tokenizer_config.json has settings of transformers:
//
//	add_bos_token              honoured with vocab.json; with tokenizer.json the template there rules, as in transformers
//	add_eos_token              the same, but true is refused with vocab.json: versions of transformers differ
//	add_prefix_space           honoured; with a class that takes tokenizer.json as it is, it must be what that says
//	added_tokens_decoder       honoured; must have the same tokens as tokenizer.json
//	bos_token ... mask_token,  special tokens; those that are not added yet are added
//	additional_special_tokens,
//	extra_special_tokens, and
//	any other key that ends in _token
//	unk_token                  also the token of bytes that the vocabulary lacks
//	split_special_tokens       honoured: special tokens are spelled out, whatever Options says
//	tokenizer_class            GPT2Tokenizer makes its own pre-tokenizer; any other class takes tokenizer.json as it is
//	errors                     "replace"
//	any other key              irrelevant if it is in a list of such keys in this package, else refused unless null or false
//
// special_tokens_map.json and added_tokens.json are read where tokenizer_config.json has no added_tokens_decoder, as in
// transformers. added_tokens.json is not read where tokenizer.json is there, which counts. clean_up_tokenization_spaces
// is irrelevant, as in transformers 5 (4 took spaces before punctuation away).
//
// # Differences
//
// Kinds of characters are those of Hugging Face's tokenizers, of Unicode 16, not those of Go. Normal forms are those of
// tokenizers, of Unicode 9.
//
//   - A folder with vocab.json and without tokenizer_config.json is taken for OPT's, with </s> before every text.
//   - A byte that the vocabulary lacks becomes the unknown token that tokenizer_config.json names even where the model of
//     tokenizer.json names none, as in the tokenizer in Python of transformers 4 (that in Rust leaves the byte out).
//   - With a byte-level decoder, an added token is decoded to its own text, also where that has characters that stand for
//     bytes.
//   - llama.cpp approximates some patterns of pre-tokenizers. NewGGUF has the patterns that the models were trained with.
package tokenizer

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// ErrFormat is wrapped by errors of files that contradict themselves, each other or their format. ErrUnsupported is
// wrapped by errors of sound files with a tokenizer of another kind.
var (
	ErrFormat      = errors.New("malformed file")
	ErrUnsupported = errors.New("unsupported")
)

// endOfText is OPT's first token of every text, and its last.
const endOfText = "</s>"

// Tokenizer turns texts into ids and back. It may be used by several goroutines.
type Tokenizer struct {
	vocabulary
	added         [2]*matcher // tokens that are searched first, and tokens that are searched after normalizing
	normal        normalizer  // nil: none
	words         splitter
	model         model
	spelling      spelling
	before, after []int // tokens of the template before and after a text
	splitSpecial  bool
	special       map[int]bool // tokens without text in decoding
	bos, eos      int          // -1: none
	ends          []int
	size          int
	widest        int // most bytes of a text in one token; 0: no limit
	checksum      uint32
}

func fail(file, format string, args ...any) error {
	return fmt.Errorf("tokenizer: %s: %s: %w", file, fmt.Sprintf(format, args...), ErrFormat)
}

func refuse(file, format string, args ...any) error {
	return fmt.Errorf("tokenizer: %s: %s: %w", file, fmt.Sprintf(format, args...), ErrUnsupported)
}

// quote is %q for strings from a file, cut to keep an error one sentence.
func quote(s string) string {
	const most = 120
	if len(s) <= most {
		return strconv.Quote(s)
	}
	return fmt.Sprintf("%q... (%d bytes)", s[:most], len(s))
}

// Checksum returns the CRC-32C of the files that [Load] has read, with their names; 0 for any other tokenizer.
func (t *Tokenizer) Checksum() uint32 { return t.checksum }

// VocabSize returns one more than the highest id.
func (t *Tokenizer) VocabSize() int { return t.size }

// ID returns the id of a token: as spelled in the vocabulary, or an added one.
func (t *Tokenizer) ID(token string) (id int, ok bool) {
	id, ok = t.ids[token]
	return id, ok
}

// Token returns the token of an id: as spelled in the vocabulary, or an added one.
func (t *Tokenizer) Token(id int) (token string, ok bool) {
	token, ok = t.tokens[id]
	return token, ok
}

// Special returns a special token, which has no text in decoding: as spelled in the vocabulary, or as it was added. ok is
// false for any other token.
//
// A token is special if one of the files says so:
//
//   - special in tokenizer.json or added_tokens_decoder, or a key for special tokens ("eos_token") in
//     tokenizer_config.json or special_tokens_map.json; without such files </s> and <pad>, as in OPT
//   - a control token of SentencePiece, a control or unknown token of a GGUF file, a special token of tekken
func (t *Tokenizer) Special(id int) (token string, ok bool) {
	if !t.special[id] {
		return "", false
	}
	return t.tokens[id], true
}

// BOS returns the id of the token that begins a text, which the files name; -1 if there is none. Whether Encode puts BOS
// before a text is another question: see Options.Bare.
func (t *Tokenizer) BOS() int { return t.bos }

// EOS returns the id of the token that ends a text: the files' EOS, or </s> if a folder names none; -1 if there is no such
// token.
func (t *Tokenizer) EOS() int { return t.eos }

// Ends returns the ids of the tokens that end a generated text: EOS, those of generation_config.json, and of a GGUF file
// also the ends of turns and messages.
func (t *Tokenizer) Ends() []int { return slices.Clone(t.ends) }
