// Package tokenizer is the byte-level byte-pair encoding of GPT-2 and OPT, read from
// Hugging Face folders in either form: tokenizer.json, or vocab.json and
// merges.txt.
//
// Added tokens are looked for in a text first. What lies between them is cut into
// words (nextWord), each word into its bytes, and neighbouring symbols of a word
// are merged, the pair that stands first among the merges first, until no more
// pair is in it. As a rule every byte has a token, so every text can be encoded,
// and decoding gives the same bytes back.
//
// OPT begins every text with </s>, and Encode does so. A text that contains the
// name of a special token, say "</s>", is encoded letter by letter: a prompt
// cannot smuggle in an end of text. transformers makes it the token, and so does
// EncodeSpecial.
//
// # Files
//
// What is read gives the ids that transformers gives, or it is refused with an
// error that names the key and its value. Of tokenizer.json that is a BPE whose
// pre-tokenizer is ByteLevel, behind any Split at a string, Digits and
// Punctuation, without a normalizer; its template may put tokens before and behind
// a text.
//
//	tokenizer_config.json      what becomes of it
//	add_bos_token              honoured with vocab.json; with tokenizer.json the template there rules, as in transformers
//	add_eos_token              the same, but true is refused with vocab.json: versions of transformers differ
//	add_prefix_space           honoured; with a class that takes tokenizer.json as it is, it must be what that says
//	added_tokens_decoder       honoured; must have the same tokens as tokenizer.json
//	bos_token ... mask_token,  special tokens; those that are not added yet are added
//	additional_special_tokens,
//	extra_special_tokens
//	unk_token                  also the token of bytes that the vocabulary lacks
//	split_special_tokens       honoured: EncodeSpecial then spells them out
//	tokenizer_class            GPT2Tokenizer(Fast), PreTrainedTokenizer(Fast), TokenizersBackend, or none
//	errors                     "replace"
//	any other key              irrelevant if it is in a list of such keys in this package, else refused unless null or false
//
// special_tokens_map.json and added_tokens.json are read where
// tokenizer_config.json has no added_tokens_decoder, as in transformers.
// added_tokens.json is not read where tokenizer.json is there, which counts.
// clean_up_tokenization_spaces is irrelevant: transformers 5 does nothing of the
// kind to a BPE (4 took spaces before punctuation away).
//
// Kinds of characters are those of Hugging Face's tokenizers (Unicode 16), not those
// of Go.
//
// Three things differ from transformers. A folder with vocab.json and without
// tokenizer_config.json is taken for OPT's, with </s> before every text. A byte
// that the vocabulary lacks becomes the unknown token that tokenizer_config.json
// names even where the model of tokenizer.json names none, as in the tokenizer in
// Python of transformers 4 (that in Rust leaves the byte out). And an added token
// is decoded to its own text, also where that has characters that stand for bytes.
//
// No library was taken instead: of gomlx/go-huggingface 0.4.0 (tokenizers/hftokenizer)
// 40% of 4680 such texts had transformers' ids, a word of 16,000 letters took a
// minute, and its module needs 47 others.
package tokenizer

import (
	"errors"
	"fmt"
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
	added         [2]*matcher // tokens that are searched first, and tokens that are searched after them
	words         splitter
	before, after []int // tokens of the template before and after a text
	splitSpecial  bool
	special       map[int]bool   // tokens without text in decoding
	texts         map[int]string // of tokens outside the vocabulary
	eos           int            // -1: none
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

// Checksum returns the CRC-32C of the files that [Load] has read, with their names; 0 for a tokenizer of [New].
func (t *Tokenizer) Checksum() uint32 { return t.checksum }

// VocabSize returns one more than the highest id.
func (t *Tokenizer) VocabSize() int { return t.size }

// ID returns the id of a token: as spelled in vocab.json, or an added one.
func (t *Tokenizer) ID(token string) (id int, ok bool) {
	id, ok = t.ids[token]
	return id, ok
}

// Token returns the token of an id: as spelled in vocab.json, or an added one.
func (t *Tokenizer) Token(id int) (token string, ok bool) {
	token, ok = t.tokens[id]
	return token, ok
}

// Special returns a special token, which has no text in decoding: as spelled in vocab.json, or as it was added. ok is
// false for any other token.
//
// A token is special if one of the folder's files says so: special in tokenizer.json or added_tokens_decoder, or a
// key for special tokens ("eos_token") in tokenizer_config.json or special_tokens_map.json. Without such files </s>
// and <pad> are special, as in OPT.
func (t *Tokenizer) Special(id int) (token string, ok bool) {
	if !t.special[id] {
		return "", false
	}
	return t.tokens[id], true
}

// EOS returns the id of the token that ends a text, </s> if the folder names none; -1 if there is no such token.
// Other files of the folder say which tokens end a generated text (package hf).
func (t *Tokenizer) EOS() int { return t.eos }
