package tokenizer

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// The largest sizes of files in bytes: several times those of the largest published vocabularies. Parsed data takes
// at most some ten times the size of its file.
const (
	maxVocab  = 32 << 20
	maxConfig = 4 << 20
)

// Limits of the JSON of these files: several times those of published files, and so small that no list, nesting or
// product of two lists takes much memory or time.
var (
	tokenizerLimits = files.Limits{Values: 4 << 20, Depth: 32, Nulls: true}
	vocabLimits     = files.Limits{Values: 4 << 20, Depth: 2} // vocabularies and merges
	addedLimits     = files.Limits{Values: 1 << 20, Depth: 2}
	partLimits      = files.Limits{Values: 1 << 12, Depth: 8} // any other part of tokenizer.json
	configLimits    = files.Limits{Values: 1 << 18, Depth: 32, Nulls: true}
	specialLimits   = files.Limits{Values: 1 << 16, Depth: 3} // special tokens of tokenizer_config.json
)

const (
	maxCuts     = 32   // parts of a pre-tokenizer: each reads the result of the part before it
	maxTemplate = 1024 // tokens of a template around a text
)

// Load opens the tokenizer of a folder in either form: tokenizer.json, or vocab.json and merges.txt. tokenizer.json
// comes first, as in transformers. Settings are read from tokenizer_config.json, special_tokens_map.json and
// added_tokens.json, if present.
func Load(dir string) (*Tokenizer, error) { return load(files.Dir(dir)) }

// LoadFS is Load for the root of a file system, such as an embedded one. name stands for the folder in errors.
func LoadFS(name string, fsys fs.FS) (*Tokenizer, error) { return load(files.FS(name, fsys)) }

func load(dir files.Folder) (*Tokenizer, error) {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	t, err := loadForm(dir.Telling(func(name string, data []byte) {
		fmt.Fprintf(sum, "%q %d\n", name, len(data))
		sum.Write(data)
	}))
	if err != nil {
		return nil, err
	}
	t.measure()
	t.checksum = sum.Sum32()
	return t, nil
}

// loadForm reads the form that is present.
func loadForm(dir files.Folder) (*Tokenizer, error) {
	s, err := readSettings(dir)
	if err != nil {
		return nil, err
	}
	if dir.Exists("tokenizer.json") {
		data, err := readFile(dir, "tokenizer.json", maxVocab)
		if err != nil {
			return nil, err
		}
		return parseJSON(dir.Path("tokenizer.json"), data, s)
	}
	vocab, err := readFile(dir, "vocab.json", maxVocab)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("tokenizer: %s: neither tokenizer.json nor vocab.json is there: %w", dir.Path(""), fs.ErrNotExist)
		}
		return nil, err
	}
	merges, err := readFile(dir, "merges.txt", maxVocab)
	if err != nil {
		return nil, err
	}
	return parsePair(dir.Path("vocab.json"), vocab, dir.Path("merges.txt"), merges, s)
}

// readFile turns errors of reading into errors of this package.
func readFile(dir files.Folder, name string, most int64) ([]byte, error) {
	data, err := dir.Read(name, most)
	var p *fs.PathError
	switch {
	case err == nil:
		return data, nil
	case errors.As(err, &p):
		return nil, fmt.Errorf("tokenizer: %s: %w", dir.Path(name), p.Err) // the sentence already has the path
	}
	return nil, fmt.Errorf("tokenizer: %s: %w", dir.Path(name), err)
}

// New reads a vocabulary, a JSON object of tokens and ids, and merges, a line for each with two tokens and a space
// between them. The result is the published tokenizer of OPT: every text begins with </s>.
func New(vocab, merges io.Reader) (*Tokenizer, error) {
	v, err := files.AtMost(vocab, maxVocab)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: vocabulary: %w", err)
	}
	m, err := files.AtMost(merges, maxVocab)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: merges: %w", err)
	}
	t, err := parsePair("vocabulary", v, "merges", m, settings{})
	if err != nil {
		return nil, err
	}
	t.measure()
	return t, nil
}
