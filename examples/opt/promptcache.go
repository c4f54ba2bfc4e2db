package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
)

// A prompt cache is a file with the tokens of a prompt, and their keys and values:
//
//	"OPTCACHE"       8 bytes
//	version          4: 1
//	fingerprint      32, of the model (model.Weights.Fingerprint)
//	model            4 for its length, and the text: the model's name in errors
//	tokens           4 for their number, and 4 for each
//	CRC-32C          4, of all before
//	sequence         as leanattention.Sequence.WriteTo writes it
//
// Numbers are little endian. A run takes the tokens that begin its prompt from the file, and computes the others, at
// least one. If the prompt is longer than the file's, the run writes the prompt to the file.
const (
	promptCacheMagic   = "OPTCACHE"
	promptCacheVersion = 1
	mostModelName      = 4096
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// promptCache is the head of such a file.
type promptCache struct {
	fingerprint [sha256.Size]byte
	model       string
	tokens      []int
}

// readHead reads the part before the sequence. most and vocab are the model's positions and tokens.
func (c *promptCache) readHead(r io.Reader, most, vocab int) error {
	sum := crc32.New(castagnoli)
	var err error
	read := func(v any) {
		if err == nil {
			err = binary.Read(io.TeeReader(r, sum), binary.LittleEndian, v)
		}
	}
	length := func(what string, most int) (n uint32) {
		if read(&n); err == nil && uint64(n) > uint64(most) {
			err = fmt.Errorf("it has %d %s, more than the %d that this model can have", n, what, most)
		}
		if err != nil {
			return 0
		}
		return n
	}
	var magic [len(promptCacheMagic)]byte
	var version uint32
	if read(&magic); err == nil && string(magic[:]) != promptCacheMagic || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("it is no prompt cache")
	}
	if read(&version); err == nil && version != promptCacheVersion {
		return fmt.Errorf("it is of version %d, and this program reads version %d", version, promptCacheVersion)
	}
	read(&c.fingerprint)
	model := make([]byte, length("bytes of a model's name", mostModelName))
	read(model)
	ids := make([]uint32, length("tokens", most))
	read(ids)
	want := sum.Sum32()
	var has uint32
	read(&has)
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("it ends in the middle")
	case err != nil:
		return err
	case has != want:
		return errors.New("it is damaged: its checksum is another one")
	}
	c.model, c.tokens = string(model), make([]int, len(ids))
	for i, id := range ids {
		if uint64(id) >= uint64(vocab) {
			return fmt.Errorf("it has token %d, and the model has tokens 0 to %d", id, vocab-1)
		}
		c.tokens[i] = int(id)
	}
	return nil
}

func (c *promptCache) writeHead(w io.Writer) error {
	sum := crc32.New(castagnoli)
	both := io.MultiWriter(w, sum)
	ids := make([]uint32, len(c.tokens))
	for i, id := range c.tokens {
		ids[i] = uint32(id)
	}
	for _, v := range []any{
		[]byte(promptCacheMagic), uint32(promptCacheVersion), c.fingerprint[:],
		uint32(len(c.model)), []byte(c.model), uint32(len(ids)), ids,
	} {
		if err := binary.Write(both, binary.LittleEndian, v); err != nil {
			return err
		}
	}
	return binary.Write(w, binary.LittleEndian, sum.Sum32())
}

// cachedPrompt is a prompt with its cache.
type cachedPrompt struct {
	name   string // value of -prompt-cache
	target string // the file: name, or the target of the link
	l      *loaded
	prompt []int
	file   file // nil: the file does not exist yet
	from   *bufio.Reader
	head   promptCache
	common int // tokens that come from the file
}

// openPromptCache reads the head of a file, if it exists, before the model is loaded. Close the result after use.
func (l *loaded) openPromptCache(prompt []int) (_ *cachedPrompt, err error) {
	p := &cachedPrompt{name: l.options.promptCache, l: l, prompt: prompt}
	defer func() {
		if err != nil {
			err = p.fail(errors.Join(err, p.Close()))
		}
	}()
	if p.target, err = linked(p.name); err != nil {
		return nil, err
	}
	info, err := drive.Stat(p.target) // opening a pipe would block
	switch {
	case errors.Is(err, fs.ErrNotExist):
		folder, err := drive.Stat(folderOf(p.target))
		if err == nil && !folder.IsDir() {
			err = errors.New("it would be in what is no folder")
		}
		return p, err
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errors.New("it is no regular file")
	}
	if p.file, err = drive.Open(p.target); err != nil {
		p.file = nil
		return nil, err
	}
	p.from = bufio.NewReaderSize(p.file, 1<<20)
	return p, p.head.readHead(p.from, l.config.MaxPositions, l.config.VocabSize)
}

func (p *cachedPrompt) fail(err error) error {
	if p.target != "" && p.target != p.name {
		return fmt.Errorf("-prompt-cache %s, a link to %q: %w", p.name, p.target, err)
	}
	return fmt.Errorf("-prompt-cache %s: %w", p.name, err)
}

// Close closes the file.
func (p *cachedPrompt) Close() error {
	if p == nil || p.file == nil {
		return nil
	}
	f := p.file
	p.file = nil
	return f.Close()
}

// capacity returns the number of tokens that the decoder must be able to hold while the file is read.
func (p *cachedPrompt) capacity() int { return len(p.head.tokens) }

// load reads the file's part of the prompt into the decoder, and returns the tokens that are left to read.
func (p *cachedPrompt) load() ([]int, error) {
	l := p.l
	fingerprint, model := l.weights.Fingerprint(), l.modelName()
	if p.file == nil {
		p.head.fingerprint, p.head.model = fingerprint, model
		return p.prompt, nil
	}
	if p.head.fingerprint != fingerprint {
		return nil, p.fail(fmt.Errorf("it is of another model or of other weights: of %q, and this is %q", p.head.model, model))
	}
	p.head.model = model
	for p.common < min(len(p.prompt)-1, len(p.head.tokens)) && p.prompt[p.common] == p.head.tokens[p.common] {
		p.common++
	}
	// The sequence is read even if none of it is used: a file that does not fit is not overwritten.
	if err := p.readSequence(); err != nil {
		return nil, p.fail(errors.Join(err, p.l.decoder.Truncate(0, 0)))
	}
	if err := p.l.decoder.Truncate(0, p.common); err != nil {
		return nil, p.fail(err)
	}
	return p.prompt[p.common:], p.Close()
}

// readSequence reads the part after the head, up to the end of the file.
func (p *cachedPrompt) readSequence() error {
	if err := p.l.decoder.ReadSequence(0, p.from, len(p.head.tokens)); err != nil {
		return err
	}
	switch _, err := p.from.ReadByte(); {
	case err == nil:
		return errors.New("something comes behind its end")
	case !errors.Is(err, io.EOF):
		return err
	}
	return nil
}

// save writes the prompt to the file, if the prompt was read and the file lacks a part of it. Afterwards the decoder
// has only the prompt.
func (p *cachedPrompt) save() error {
	d, n := p.l.decoder, len(p.prompt)
	has := 0
	for has < min(n, len(p.head.tokens)) && p.prompt[has] == p.head.tokens[has] {
		has++
	}
	if has == n || d.Len(0) < n {
		return nil
	}
	if err := d.Truncate(0, n); err != nil {
		return err
	}
	head := p.head
	head.tokens = p.prompt
	err := writeAtomically(p.target, func(w io.Writer) error {
		if err := head.writeHead(w); err != nil {
			return err
		}
		return d.WriteSequence(0, w)
	})
	if err != nil {
		return p.fail(err)
	}
	p.head = head
	return nil
}

// modelName returns the model's name in a file, for users.
func (l *loaded) modelName() string {
	text := fmt.Sprintf("%s (%d layers of width %d, %d heads, %v weights)", name(l.options.model), l.config.Layers, l.config.HiddenSize, l.config.Heads, l.options.weightsName)
	return text[:min(len(text), mostModelName)]
}
