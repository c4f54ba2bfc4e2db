package decoder

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/rope"

	"gorgonia.org/tensor"
)

// A saved text, all numbers little endian:
//
//	"LEANTEXT"   8 bytes
//	version      4: 1
//	fingerprint  32: SHA-256 of what the keys and values depend on besides the tokens
//	model        4 for the length, and the text: the model's name in errors
//	tokens       4 for their number, and 4 for each
//	CRC-32C      4: of all before
//	sequence     as leanattention.Sequence.WriteTo writes it
const (
	savedMagic    = "LEANTEXT"
	savedVersion  = 1
	mostModelName = 4096
)

// savedHead is the part of a saved text before the sequence.
type savedHead struct {
	fingerprint [sha256.Size]byte
	model       string
	tokens      []int
}

// Save writes the tokens, keys and values of the longest beginning of a text that the engine has: of texts that are computed, and
// of ended texts that are still in the cache. Save returns the number of tokens that were written; 0: the engine has no beginning
// of the text, and nothing was written.
//
//   - Size: some hundred bytes, 4 bytes a token, and the keys and values in the cache's type.
//   - Started texts wait until Save returns.
//
// Errors: [ErrClosed]; [ErrUnsupported] with several ranks, each of which has a part of the cache; errors of w; errors of the model's files.
func (e *Engine) Save(w io.Writer, tokens []int) (n int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.mayKeep("Save"); err != nil {
		return 0, err
	}
	var from *la.Sequence
	for _, t := range e.scheduler.live {
		if m := common(t.tokens[:t.read()], tokens); m > n && begins(t.seq, m) {
			from, n = t.seq, m
		}
	}
	for _, p := range e.scheduler.retained {
		if m := common(p.tokens, tokens); m > n && begins(p.seq, m) {
			from, n = p.seq, m
		}
	}
	if n == 0 {
		return 0, nil
	}
	head := savedHead{tokens: tokens[:n]}
	if head.fingerprint, head.model, err = e.identity(); err != nil {
		return 0, err
	}
	s, err := from.Fork()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.Release()) }()
	if err := s.Truncate(n); err != nil {
		return 0, err
	}
	if err := head.write(w); err != nil {
		return 0, fmt.Errorf("decoder: Save: %w", err)
	}
	if _, err := s.WriteTo(w); err != nil {
		return 0, err
	}
	return n, nil
}

// Load reads a text that [Engine.Save] has written, and returns its tokens. Later texts with the same beginning, of 16 tokens or
// more, do not compute that beginning, until the cache needs the memory for other texts.
//
//   - The file must be of the same model, with the same Weights, Exact, QuantisedRows and Cache of [Options], and have at most Context tokens.
//     Sizes and devices may differ. Large models are recognized by samples of their weights: see [Model.Checksums]. Engines of
//     [NewEngine] are recognized by the network's Sizes and by the weights.
//   - Load reads to the end of the saved text and no further. Started texts wait until Load returns.
//   - Checksums find damage. They are no signature: crafted data in the right form load, and can only change texts.
//
// Errors, after which the engine has no more texts than before:
//
//   - [ErrFormat]: no saved text, damaged, or cut short
//   - [ErrConfig]: of another model or other options; the error names both
//   - [ErrTooLong]: more tokens than Context
//   - [ErrUnsupported]: another version, or several ranks
//   - [ErrClosed], errors of r, and those of leanattention.Cache.ReadSequence, such as ErrCacheFull while texts need the cache
func (e *Engine) Load(r io.Reader) (tokens []int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.mayKeep("Load"); err != nil {
		return nil, err
	}
	var head savedHead
	if err := head.read(r, e.options.Context, e.network.Sizes().Vocab); err != nil {
		return nil, fmt.Errorf("decoder: Load: %w", err)
	}
	fingerprint, model, err := e.identity()
	if err != nil {
		return nil, err
	}
	if head.fingerprint != fingerprint {
		return nil, fmt.Errorf("decoder: Load: the text is of %q, and this is %q: other keys and values: %w", head.model, model, ErrConfig)
	}
	e.scheduler.makeFree((len(head.tokens)+pageSize-1)/pageSize, nil)
	s, err := e.cache.ReadSequence(r)
	if errors.Is(err, la.ErrFormat) {
		err = &translated{err, ErrFormat}
	}
	if err != nil {
		return nil, err
	}
	if n := s.Len(); n != len(head.tokens) {
		return nil, errors.Join(fmt.Errorf("decoder: Load: keys and values of %d tokens, and there are %d tokens: %w", n, len(head.tokens), ErrFormat), s.Release())
	}
	e.scheduler.retain(prefix{tokens: head.tokens, seq: s})
	return slices.Clone(head.tokens), nil
}

// mayKeep returns the error of an engine that cannot save or load.
func (e *Engine) mayKeep(op string) error {
	e.queue.Lock()
	defer e.queue.Unlock()
	switch {
	case e.queue.closed:
		return fmt.Errorf("decoder: %s: engine: %w", op, ErrClosed)
	case e.queue.err != nil:
		return e.queue.err
	case e.options.several():
		return fmt.Errorf("decoder: %s: each of %d ranks has a part of the cache: %w", op, e.options.Ranks.World().Size, ErrUnsupported)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (h *savedHead) write(w io.Writer) error {
	sum := crc32.New(castagnoli)
	both := io.MultiWriter(w, sum)
	ids := make([]uint32, len(h.tokens))
	for i, id := range h.tokens {
		ids[i] = uint32(id)
	}
	for _, v := range []any{
		[]byte(savedMagic), uint32(savedVersion), h.fingerprint[:], uint32(len(h.model)), []byte(h.model), uint32(len(ids)), ids,
	} {
		if err := binary.Write(both, binary.LittleEndian, v); err != nil {
			return err
		}
	}
	return binary.Write(w, binary.LittleEndian, sum.Sum32())
}

// read reads the head of a text with at most most tokens of a vocabulary.
func (h *savedHead) read(r io.Reader, most, vocab int) error {
	sum := crc32.New(castagnoli)
	var err error
	read := func(v any) {
		if err == nil {
			err = binary.Read(io.TeeReader(r, sum), binary.LittleEndian, v)
		}
	}
	ends := func() bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
	var magic [len(savedMagic)]byte
	if read(&magic); err == nil && string(magic[:]) != savedMagic || ends() {
		return fmt.Errorf("no saved text: it does not begin with %q: %w", savedMagic, ErrFormat)
	}
	var version, length, count uint32
	if read(&version); err == nil && version != savedVersion {
		return fmt.Errorf("a saved text of version %d, and this package reads version %d: %w", version, savedVersion, ErrUnsupported)
	}
	read(&h.fingerprint)
	if read(&length); err == nil && length > mostModelName {
		return fmt.Errorf("the model's name has %d bytes, more than %d: %w", length, mostModelName, ErrFormat)
	}
	var model []byte
	var ids []uint32
	if err == nil {
		model = make([]byte, length)
	}
	read(model)
	if read(&count); err == nil && uint64(count) > uint64(most) {
		return fmt.Errorf("the text has %d tokens, and Options.Context is %d: %w", count, most, ErrTooLong)
	}
	if err == nil {
		ids = make([]uint32, count)
	}
	read(ids)
	want := sum.Sum32()
	var has uint32
	read(&has)
	switch {
	case ends():
		return fmt.Errorf("the saved text ends in its head: %w", ErrFormat)
	case err != nil:
		return err
	case has != want:
		return fmt.Errorf("the saved text is damaged: the checksum of its head is %08x, and %08x is stored: %w", want, has, ErrFormat)
	}
	h.model, h.tokens = string(model), make([]int, len(ids))
	for i, id := range ids {
		if uint64(id) >= uint64(vocab) {
			return fmt.Errorf("token %d of the saved text is %d, not in [0, %d): %w", i, id, vocab, ErrFormat)
		}
		h.tokens[i] = int(id)
	}
	return nil
}

// identity returns a fingerprint of everything but the tokens that keys and values depend on, and a name for errors. The caller
// holds e.mu.
func (e *Engine) identity() (sum [sha256.Size]byte, name string, err error) {
	if e.options.TPLA != nil {
		return sum, "", fmt.Errorf("decoder: Options.TPLA: a saved text does not tell how latent vectors were rotated: %w", ErrUnsupported)
	}
	if e.name == "" {
		lines, err := checksums(e.network, e.from)
		if err != nil {
			return sum, "", fileError(err)
		}
		e.name = "a network"
		if e.model != nil {
			e.name, lines = e.model.file, append(e.model.identity(), lines...)
		}
		o, sizes := &e.options, e.network.Sizes()
		weights, precision := "stored", "mixed"
		if o.Weights != (tensor.Dtype{}) {
			weights = o.Weights.String()
		}
		if o.Exact {
			precision = "exact"
		} else if o.QuantisedRows {
			precision = "quantised"
		}
		e.name = e.name[max(0, len(e.name)-mostModelName/2):]
		e.name = fmt.Sprintf("%s (%d layers, %d heads of %d, %s weights, %s products)", e.name, sizes.Layers, sizes.KVHeads, sizes.HeadDim, weights, precision)
		var rotary []rope.Config // may depend on the context
		if t, ok := e.network.(*transformer); ok {
			rotary = t.rotary
		}
		h := sha256.New()
		// The sizes as of version 1, so that older files stay valid.
		first := struct {
			Vocab, Context, Layers, KVHeads, HeadDim int
			Windows                                  []int
			LogitCap                                 float64
		}{sizes.Vocab, sizes.Context, sizes.Layers, sizes.KVHeads, sizes.HeadDim, sizes.Windows, sizes.LogitCap}
		fmt.Fprintf(h, "%q\n%+v\n%+v\n%s\n%s\n", lines, first, rotary, weights, precision)
		if sizes.Latent > 0 {
			fmt.Fprintf(h, "latent %d\n", sizes.Latent)
		}
		h.Sum(e.fingerprint[:0])
	}
	return e.fingerprint, e.name, nil
}
