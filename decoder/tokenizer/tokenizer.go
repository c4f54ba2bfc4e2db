// Package tokenizer converts text to token ids and back. The ids equal those of the tokenizers that models are trained
// with.
//
// [Load] reads a folder, in the first of the following forms that the folder contains:
//
//	tokenizer.json                        Hugging Face's tokenizers
//	vocab.json and merges.txt             GPT-2 and OPT
//	tekken.json, tekken_240911.json       Mistral's tekken
//	tokenizer.model, tokenizer.model.v3   SentencePiece
//
// [NewGGUF] takes the vocabulary of a GGUF file.
//
// Encoding has four stages:
//
//  1. The text is split at added tokens.
//  2. The text between added tokens is normalized, and split at the added tokens that are normalized.
//  3. The pre-tokenizer splits the remaining text into words.
//  4. The model converts each word to tokens.
//
// The models are:
//
//   - BPE on bytes. The pair of neighbouring symbols with the lowest rank is merged first. The rank is the position in
//     the list of merges (GPT-2, Llama 3, Qwen, DeepSeek, gpt-oss), or the number of the merged token (tekken).
//   - BPE on characters, ranked by a list of merges or by scores. A character outside the vocabulary becomes the tokens of
//     its bytes (Llama 2, Gemma).
//   - Unigram: the segmentation with the largest sum of scores (T5, XLM-R).
//   - WordPiece, only from GGUF files: the longest tokens from left to right (BERT).
//
// By default, the name of a special token in a text, such as "</s>", is encoded as ordinary text, so that a prompt cannot
// contain an end of text. With [Options].Special the name is encoded as the token, as in transformers.
//
// # Supported files
//
// A tokenizer that loads without an error gives the ids of the format's reference program. An error names the key and the
// value:
//
//   - ErrFormat: a file contradicts itself, another file or its format.
//   - ErrUnsupported: a valid file has a key or value that this package does not implement.
//
// The supported parts of tokenizer.json are:
//
//	model            BPE and Unigram, without dropout, continuing_subword_prefix and end_of_word_suffix
//	normalizer       Lowercase, NFC, NFD, NFKC, NFKD, Precompiled, Prepend, Replace, Sequence, Strip, StripAccents
//	pre_tokenizer    ByteLevel, Digits, Metaspace, Punctuation, Sequence, Split, WhitespaceSplit
//	post_processor   ByteLevel, Sequence, TemplateProcessing
//	decoder          ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip
//
// tokenizer_config.json has settings of transformers:
//
//	add_bos_token              honoured with vocab.json and tokenizer.model; ignored with tokenizer.json, whose template
//	                           decides, as in transformers
//	add_eos_token              honoured with tokenizer.model; ignored with tokenizer.json; true is refused with vocab.json,
//	                           because versions of transformers differ
//	add_prefix_space           honoured; with a class that uses tokenizer.json unchanged, both files must agree
//	added_tokens_decoder       honoured; must list the same tokens as tokenizer.json
//	bos_token ... mask_token,  special tokens; a special token that is no added token yet becomes one
//	additional_special_tokens,
//	extra_special_tokens, and
//	any other key that ends in _token
//	unk_token                  also the token of bytes that the vocabulary lacks
//	split_special_tokens       honoured: true encodes special tokens as ordinary text, regardless of Options.Special
//	tokenizer_class            GPT2Tokenizer builds its own pre-tokenizer; any other class uses tokenizer.json unchanged
//	errors                     only "replace"
//	any other key              ignored if this package lists the key as irrelevant; otherwise refused unless null or false
//
// special_tokens_map.json and added_tokens.json are read only if tokenizer_config.json has no added_tokens_decoder, as in
// transformers. added_tokens.json is read only without tokenizer.json, which lists the added tokens itself.
// clean_up_tokenization_spaces is ignored, as in transformers 5. (Transformers 4 removed spaces before punctuation.)
//
// # Differences from other tokenizers
//
// Character classes are those of Hugging Face's tokenizers (Unicode 16), not those of package unicode. Normal forms are
// also those of Hugging Face's tokenizers (Unicode 9).
//
//   - A folder with vocab.json and without tokenizer_config.json is read as OPT's: </s> precedes every text.
//   - A byte that the vocabulary lacks becomes the unknown token of tokenizer_config.json, even if the model in
//     tokenizer.json names no unknown token. The Python tokenizer of transformers 4 does the same; the Rust tokenizer
//     omits the byte.
//   - With a byte-level decoder, an added token is decoded to its own text, even if the text has characters that stand
//     for bytes.
//   - NewGGUF has the pre-tokenizer patterns that the models were trained with. llama.cpp approximates some patterns.
package tokenizer

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// Errors of loading wrap ErrFormat if a file contradicts itself, another file or its format. Errors of loading wrap
// ErrUnsupported if a valid file has a tokenizer that this package does not implement.
var (
	ErrFormat      = errors.New("malformed file")
	ErrUnsupported = errors.New("unsupported")
)

// endOfText is OPT's BOS and EOS token.
const endOfText = "</s>"

// Tokenizer converts texts to ids and back. A Tokenizer is safe for concurrent use.
type Tokenizer struct {
	vocabulary
	added         [2]*matcher // matchers of added tokens before and after normalizing
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
	widest        int // largest number of bytes of text in one token; 0: unbounded
	checksum      uint32
}

func fail(file, format string, args ...any) error {
	return fmt.Errorf("tokenizer: %s: %s: %w", file, fmt.Sprintf(format, args...), ErrFormat)
}

func refuse(file, format string, args ...any) error {
	return fmt.Errorf("tokenizer: %s: %s: %w", file, fmt.Sprintf(format, args...), ErrUnsupported)
}

// quote formats a string from a file with %q and truncates long strings.
func quote(s string) string {
	const most = 120
	if len(s) <= most {
		return strconv.Quote(s)
	}
	return fmt.Sprintf("%q... (%d bytes)", s[:most], len(s))
}

// Checksum returns the CRC-32C of the names and contents of the files that [Load] or [LoadFS] read. Checksum returns 0 for
// any other tokenizer.
func (t *Tokenizer) Checksum() uint32 { return t.checksum }

// VocabSize returns one more than the highest id.
func (t *Tokenizer) VocabSize() int { return t.size }

// ID returns the id of a token, which is spelled as in the vocabulary or as an added token.
func (t *Tokenizer) ID(token string) (id int, ok bool) {
	id, ok = t.ids[token]
	return id, ok
}

// Token returns the token of an id, spelled as in the vocabulary or as an added token.
func (t *Tokenizer) Token(id int) (token string, ok bool) {
	token, ok = t.tokens[id]
	return token, ok
}

// Special returns the special token of an id, spelled as in the vocabulary or as an added token. ok is false if the token
// is not special. Decode omits special tokens.
//
// The files determine the special tokens:
//
//   - tokenizer.json and added_tokens_decoder: tokens marked special
//   - tokenizer_config.json and special_tokens_map.json: tokens of a key for special tokens, such as "eos_token"
//   - none of the files above: </s> and <pad>, as in OPT
//   - SentencePiece: control tokens
//   - GGUF: control tokens and unknown tokens
//   - tekken: special tokens
func (t *Tokenizer) Special(id int) (token string, ok bool) {
	if !t.special[id] {
		return "", false
	}
	return t.tokens[id], true
}

// BOS returns the id of the beginning-of-text token that the files name, or -1 if the files name none. Some tokenizers
// have a BOS that Encode does not put before a text.
func (t *Tokenizer) BOS() int { return t.bos }

// EOS returns the id of the end-of-text token that the files name. If a folder names none, EOS returns the id of </s>. EOS
// returns -1 if there is no such token.
func (t *Tokenizer) EOS() int { return t.eos }

// Ends returns the ids of the tokens that end a generated text:
//
//   - EOS
//   - the ids of eos_token_id in generation_config.json
//   - from a GGUF file, also the tokens that end a turn or a message
func (t *Tokenizer) Ends() []int { return slices.Clone(t.ends) }
