package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// Size limits of files in bytes: several times the largest published vocabularies. Parsed data takes at most about ten
// times the size of its file.
const (
	maxVocab  = 64 << 20
	maxConfig = 4 << 20
)

// Limits of the JSON in tokenizer files. The limits are several times the sizes in published files. They bound the memory
// and time that a list, a nesting or a product of two lists takes.
var (
	tokenizerLimits = files.Limits{Values: 4 << 20, Depth: 32, Nulls: true}
	vocabLimits     = files.Limits{Values: 4 << 20, Depth: 2} // vocabularies and merges
	unigramLimits   = files.Limits{Values: 4 << 20, Depth: 3}
	addedLimits     = files.Limits{Values: 1 << 20, Depth: 2}
	partLimits      = files.Limits{Values: 1 << 12, Depth: 8} // any other part of tokenizer.json
	configLimits    = files.Limits{Values: 1 << 18, Depth: 32, Nulls: true}
	specialLimits   = files.Limits{Values: 1 << 16, Depth: 3} // special tokens of tokenizer_config.json
)

const (
	maxCuts     = 32   // parts of a pre-tokenizer; each part reads the output of the previous part
	maxTemplate = 1024 // tokens of a template around a text
)

// Load loads the tokenizer of a folder. The vocabulary is the first of the following that the folder contains:
//
//   - tokenizer.json
//   - vocab.json with merges.txt
//   - tekken.json
//   - tokenizer.model
//
// Load reads settings from tokenizer_config.json, special_tokens_map.json and added_tokens.json, and end tokens
// ([Tokenizer.Ends]) from generation_config.json. Each of the four files is optional.
//
// Mistral's file names carry versions: tekken_240911.json, tokenizer.model.v3. Of several such files, Load reads the one
// whose name is last in lexical order.
func Load(dir string) (*Tokenizer, error) { return load(files.Dir(dir)) }

// LoadFS loads a tokenizer from the root of a file system, like [Load]. Errors use name as the name of the folder.
func LoadFS(name string, fsys fs.FS) (*Tokenizer, error) { return load(files.FS(name, fsys)) }

func load(dir files.Folder) (*Tokenizer, error) {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	dir = dir.Telling(func(name string, data []byte) {
		fmt.Fprintf(sum, "%q %d\n", name, len(data))
		sum.Write(data)
	})
	t, err := loadForm(dir)
	if err != nil {
		return nil, err
	}
	if err := t.generationConfig(dir); err != nil {
		return nil, err
	}
	t.measure()
	t.checksum = sum.Sum32()
	return t, nil
}

// loadForm reads the first form that is present, in the order of Load.
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
	if dir.Exists("vocab.json") {
		vocab, err := readFile(dir, "vocab.json", maxVocab)
		if err != nil {
			return nil, err
		}
		merges, err := readFile(dir, "merges.txt", maxVocab)
		if err != nil {
			return nil, err
		}
		return parsePair(dir.Path("vocab.json"), vocab, dir.Path("merges.txt"), merges, s)
	}
	for _, form := range []struct {
		begin, end string
		parse      func(file string, data []byte, s settings) (*Tokenizer, error)
	}{{"tekken", ".json", parseTekken}, {"tokenizer.model", "", parseModel}} {
		name, err := last(dir, form.begin, form.end)
		if err != nil {
			return nil, err
		}
		if name != "" {
			data, err := readFile(dir, name, maxVocab)
			if err != nil {
				return nil, err
			}
			return form.parse(dir.Path(name), data, s)
		}
	}
	return nil, fmt.Errorf("tokenizer: %s: neither tokenizer.json nor vocab.json, tekken.json or tokenizer.model is there: %w", dir.Path(""), fs.ErrNotExist)
}

// last returns the lexically last file name that has prefix begin and suffix end, without overlap. If there is none, last
// returns "".
func last(dir files.Folder, begin, end string) (string, error) {
	names, err := dir.Names()
	if err != nil {
		return "", fmt.Errorf("tokenizer: %s: %w", dir.Path(""), err)
	}
	found := ""
	for _, name := range names {
		if strings.HasPrefix(name, begin) && strings.HasSuffix(name, end) && len(name) >= len(begin)+len(end) {
			found = max(found, name)
		}
	}
	return found, nil
}

// generationConfig sets t.ends from t.eos and generation_config.json.
func (t *Tokenizer) generationConfig(dir files.Folder) error {
	if t.eos >= 0 {
		t.ends = append(t.ends, t.eos)
	}
	const name = "generation_config.json"
	if !dir.Exists(name) {
		return nil
	}
	fields, err := readObject(dir, name)
	if err != nil {
		return err
	}
	raw := fields["eos_token_id"]
	if null(raw) {
		return nil
	}
	var all []int
	if json.Unmarshal(raw, &all) != nil {
		var one int
		if err := json.Unmarshal(raw, &one); err != nil {
			return fail(dir.Path(name), "eos_token_id is %s, neither an id nor a list of ids", quote(string(raw)))
		}
		all = []int{one}
	}
	for _, id := range all {
		if id < 0 || id >= phantom {
			return fail(dir.Path(name), "eos_token_id has %d", id)
		}
		if !slices.Contains(t.ends, id) {
			t.ends = append(t.ends, id)
		}
	}
	return nil
}

// readFile reads a file of at most most bytes and wraps the errors of reading.
func readFile(dir files.Folder, name string, most int64) ([]byte, error) {
	data, err := dir.Read(name, most)
	var p *fs.PathError
	switch {
	case err == nil:
		return data, nil
	case errors.As(err, &p):
		return nil, fmt.Errorf("tokenizer: %s: %w", dir.Path(name), p.Err) // the message already has the path
	}
	return nil, fmt.Errorf("tokenizer: %s: %w", dir.Path(name), err)
}

// New returns a tokenizer with the settings of the published OPT tokenizer: every text begins with </s>.
//
//   - vocab is a JSON object that maps tokens to ids.
//   - merges has one merge a line: two tokens with a space between them.
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
	if t.eos >= 0 {
		t.ends = []int{t.eos}
	}
	t.measure()
	return t, nil
}
