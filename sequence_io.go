package leanattention

import (
	"encoding/binary"
	"errors"
	"io"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/pages"
)

// A saved sequence, all numbers little endian:
//
//	offset  bytes
//	 0      8      "LEANSEQ\n"
//	 8      4      version: 1, or 2 where tokens were given back
//	12      4      element type: 1 float32, 2 float16, 3 bfloat16; of e4m3 and int8 with scales of tokens 4 and 5, of heads 6 and 7,
//	               of pages 8 and 9; q4 10; more by 2^8 for each of the EdgeLayers, of which those at either end are bfloat16
//	16      4      Layers
//	20      4      KVHeads
//	24      4      HeadDim
//	28      4      ValueDim; more by 2^31 if values are parts of keys, which follow alone then
//	32      8      tokens
//	40      8      only in version 2: the first token that was given back
//	48      8      only in version 2: the first token behind those
//	40, 56  4      CRC-32C of all before
//	44, 60         only with scales of heads: KeyScales and ValueScales (Layers, KVHeads), float32
//	               only with scales of pages: PageSize, 4 bytes
//	               for each layer: its keys (tokens, KVHeads, HeadDim), then its values (tokens, KVHeads, ValueDim);
//	               scales (tokens, KVHeads, scales of a row), or (pages, KVHeads), follow what they scale; the bfloat16 part of e4m3 keys with
//	               values in them comes last
//	end     4      CRC-32C of all before
//
// Data are those of the tokens that were not given back. Nothing in it depends on pages or on
// where they are. A later version may change all behind the first 12 bytes.
const (
	savedMagic   = "LEANSEQ\n"
	savedVersion = 1
	savedWithGap = 2
	savedInKeys  = 1 << 31 // of ValueDim
	headerBytes  = 44
	gapBytes     = 16
	sumBytes     = operand.SumBytes
)

// WriteTo saves the sequence's keys and values, for [Cache.ReadSequence]. It implements io.WriterTo: n is the number of bytes
// written, also after an error.
//
//   - Size: 48 bytes and Len*Layers*KVHeads*(HeadDim+ValueDim) elements with their scales, bit for bit. After pages were freed
//     ([CacheConfig].Window): 64 bytes and the kept tokens, which are the SinkTokens and the last Window+Rewind-1.
//   - The bytes do not depend on the page size, nor on the device. They do not say which model and which tokens they are of.
//   - Pieces have at most 1 MB, or one token's keys of a layer if these are larger.
//   - WriteTo saves the sequence as it is at the call, and holds no lock while w writes: other steps go on, and the sequence may be
//     appended to, truncated and released. WriteTo holds the pages until it returns, as a [Sequence.Fork] would, so an append
//     meanwhile may need one more page.
//
// Errors:
//
//   - [ErrState] while the sequence is in an open step; [ErrClosed]; errors of w
//   - [ErrFormat] for NaN in a cache of E4M3, int8 or Q4, which ReadSequence would refuse
//   - on a GPU: errors of the GPU; [ErrUnsupported] during [GPU.Record]; under the build tag cuda [ErrClosed] after the machine with
//     the tokens was closed
//
// n is 0 after an error before the first write.
func (s *Sequence) WriteTo(w io.Writer) (n int64, err error) {
	const op = "WriteTo"
	if err := s.made(op); err != nil {
		return 0, err
	}
	if w == nil {
		return 0, errs.Errorf(op, ErrState, "w is nil")
	}
	held, err := s.hold(op)
	if err != nil {
		return 0, err
	}
	c := s.cache
	defer func() { err = errors.Join(err, c.giveUp(op, held)) }()

	out := &operand.SumWriter{W: w, Op: op}
	header := append(c.savedHeader(held.table.Tokens, held.table.Gap), c.config.savedScales()...)
	err = held.eachPart(held.table.Gap, func(part *sequencePart) error {
		if err := c.transfer(op, part, false); err != nil {
			return err
		}
		part.copyTokens(false)
		if err := part.checkNumbers(op); err != nil {
			return err
		}
		if out.N == 0 { // the pages can be read
			if err := out.Write(header); err != nil {
				return err
			}
		}
		return out.Write(part.tokens)
	})
	if err == nil && out.N == 0 { // no tokens
		err = out.Write(header)
	}
	if err == nil {
		err = out.Write(binary.LittleEndian.AppendUint32(nil, out.Sum))
	}
	return out.N, err
}

// hold returns a sequence of the tokens of s, for this call alone. Only the counts of pages include it.
func (s *Sequence) hold(op string) (*Sequence, error) {
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.usable(op); err != nil {
		return nil, err
	}
	table, err := c.pool.Clone(&s.table)
	if err != nil {
		return nil, pagesError(op, err)
	}
	return c.newSequence(table), nil
}

// giveUp frees the pages of a sequence that is not counted.
func (c *Cache) giveUp(op string, s *Sequence) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.holders, s)
	if err := c.pool.Truncate(&s.table, 0); err != nil {
		return pagesError(op, err)
	}
	return nil
}

// ReadSequence reads a sequence that [Sequence.WriteTo] has saved. The caches have the same Layers, KVHeads, HeadDim, ValueDim and
// DType; page sizes, numbers of pages and devices may differ.
//
//   - A cache with a window keeps the tokens that its window reaches. A sequence whose pages were freed fits a cache whose
//     Window and SinkTokens need none of the freed tokens. [Sequence.Rewind] says how many last tokens can be removed.
//   - ReadSequence reads to the end of the saved sequence and no further. It holds pages for all tokens from the beginning, and no
//     lock while r reads. The cache bounds the memory, whatever r returns.
//   - A checksum finds damage. It is no signature: crafted data in the right form load, and can only change the results of attention.
//
// Errors, after which the cache is as before:
//
//   - [ErrFormat]: not a saved sequence, damaged, NaN in 8 or 4 bits, or cut short. The error is also io.EOF if r is empty, else io.ErrUnexpectedEOF.
//   - [ErrUnsupported]: another version of the format
//   - [ErrShape], [ErrDType]: another cache, or one that needs freed tokens
//   - [ErrCacheFull]: too few free pages; [ErrLength]: more tokens than all pages hold; [ErrClosed]; errors of r
//   - on a GPU: errors of the GPU; [ErrUnsupported] during [GPU.Record], and under the build tag cuda before the first run of a layer
func (c *Cache) ReadSequence(r io.Reader) (_ *Sequence, err error) {
	const op = "ReadSequence"
	if err := c.made(op); err != nil {
		return nil, err
	}
	if r == nil {
		return nil, errs.Errorf(op, ErrState, "r is nil")
	}
	in := &operand.SumReader{R: r, Op: op}
	tokens, gone, err := c.readHeader(in)
	if err != nil {
		return nil, err
	}
	read, err := c.takeFor(op, tokens, gone)
	if err != nil {
		return nil, err
	}
	whole := false
	defer func() {
		if !whole { // also if r panics
			err = errors.Join(err, c.giveUp(op, read))
		}
	}()
	err = read.eachPart(gone, func(part *sequencePart) error {
		if err := in.Read(part.tokens); err != nil {
			return err
		}
		if err := part.checkNumbers(op); err != nil {
			return err
		}
		part.copyTokens(true)
		return c.transfer(op, part, true)
	})
	if err != nil {
		return nil, err
	}
	if err := in.Check("the data"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	if whole = !c.closed; whole {
		c.count(read)
	}
	c.mu.Unlock()
	if !whole {
		return nil, errs.Errorf(op, ErrClosed, "cache")
	}
	return read, nil
}

// takeFor returns a sequence with pages for tokens tokens, without those of the gap and those that no window reaches. It is not counted yet.
func (c *Cache) takeFor(op string, tokens uint64, gap pages.Gap) (*Sequence, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errs.Errorf(op, ErrClosed, "cache")
	}
	if c.config.Window > 0 && tokens < math.MaxInt { // it keeps all if there are so many
		if g := c.config.behind(int(tokens)); g.End > max(g.First, gap.End) {
			gap = g
		} else if gap.End > 0 {
			gap.First = g.First
		}
	}
	size := uint64(c.config.PageSize)
	need := tokens / size // tokens may be more than an int has
	if tokens%size != 0 {
		need++
	}
	table := pages.Table{Gap: gap}
	need -= uint64(c.pool.Shift(&table)) / size
	if all := c.config.Pages; need > uint64(all) {
		return nil, errs.Errorf(op, ErrLength, "%d pages of %d tokens needed for %d tokens: the cache has %d in all, and takes no sequence of that length", need, size, tokens, all)
	}
	if free := c.pool.Free(); need > uint64(free) {
		return nil, errs.Errorf(op, ErrCacheFull, "%d pages of %d tokens needed for %d tokens, %d of %d free", need, size, tokens, free, c.config.Pages)
	}
	list, err := c.pool.Take(nil, int(need))
	if err != nil {
		return nil, pagesError(op, err)
	}
	table.Pages, table.Tokens = list, int(tokens)
	return c.newSequence(table), nil
}

// savedHeader returns the header of a saved sequence of c, with its checksum.
func (c *Cache) savedHeader(tokens int, gap pages.Gap) []byte {
	version := uint32(savedVersion)
	if gap != (pages.Gap{}) {
		version = savedWithGap
	}
	b := append(make([]byte, 0, headerBytes+gapBytes), savedMagic...)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = binary.LittleEndian.AppendUint32(b, uint32(kvstore.Number(c.config.DType, c.config.scales())|c.config.EdgeLayers<<8))
	for _, n := range [...]int{c.config.Layers, c.config.KVHeads, c.config.HeadDim, c.config.ValueDim} {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	if c.config.ValuesInKeys {
		b[len(b)-1] |= savedInKeys >> 24
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(tokens))
	if version == savedWithGap {
		b = binary.LittleEndian.AppendUint64(b, uint64(gap.First))
		b = binary.LittleEndian.AppendUint64(b, uint64(gap.End))
	}
	return binary.LittleEndian.AppendUint32(b, operand.Checksum(b))
}

// readHeader returns the number of tokens and the dropped tokens of a saved sequence that fits c.
func (c *Cache) readHeader(in *operand.SumReader) (tokens uint64, gone pages.Gap, err error) {
	b := make([]byte, headerBytes-sumBytes, headerBytes-sumBytes+gapBytes)
	begin := len(savedMagic) + 4 // what every version has
	if err := in.Read(b[:begin]); err != nil {
		return 0, gone, err
	}
	if string(b[:len(savedMagic)]) != savedMagic {
		return 0, gone, errs.Errorf(in.Op, ErrFormat, "it begins with %q and not with %q: it is no saved sequence", b[:len(savedMagic)], savedMagic)
	}
	switch v := binary.LittleEndian.Uint32(b[begin-4:]); v {
	case savedVersion:
	case savedWithGap:
		b = b[:len(b)+gapBytes]
	default:
		return 0, gone, errs.Errorf(in.Op, ErrUnsupported, "a saved sequence of version %d; this package reads versions %d and %d", v, savedVersion, savedWithGap)
	}
	if err := in.Read(b[begin:]); err != nil {
		return 0, gone, err
	}
	if err := in.Check("the header"); err != nil {
		return 0, gone, err
	}
	tokens = binary.LittleEndian.Uint64(b[32:])
	if len(b) > headerBytes-sumBytes {
		first, end := binary.LittleEndian.Uint64(b[40:]), binary.LittleEndian.Uint64(b[48:])
		if first >= end || end > tokens || tokens > math.MaxInt {
			return 0, gone, errs.Errorf(in.Op, ErrFormat, "tokens [%d, %d) of %d were given back", first, end, tokens)
		}
		gone = pages.Gap{First: int(first), End: int(end)}
	}
	if err := c.fits(in.Op, b); err != nil {
		return 0, gone, err
	}
	if err := c.config.readScales(in); err != nil {
		return 0, gone, err
	}
	return tokens, gone, c.config.doesWithout(in.Op, gone, tokens)
}

// doesWithout returns an error if layers on the cache need tokens that a saved sequence has dropped.
func (c *CacheConfig) doesWithout(op string, gone pages.Gap, tokens uint64) error {
	if gone == (pages.Gap{}) {
		return nil
	}
	if c.Window == 0 || gone.First < c.SinkTokens || gone.End > int(tokens)-c.Window+1 {
		return errs.Errorf(op, ErrShape, "the saved sequence has given back tokens [%d, %d) of %d; the cache has a Window of %d and %d SinkTokens",
			gone.First, gone.End, tokens, c.Window, c.SinkTokens)
	}
	return nil
}

// fits compares c with the header of a saved sequence.
func (c *Cache) fits(op string, header []byte) error {
	field := func(at int) uint32 { return binary.LittleEndian.Uint32(header[at:]) }
	t, scales, most, ok := kvstore.TypeOf(field(12) & 0xff)
	if !ok {
		return errs.Errorf(op, ErrFormat, "element type %d, outside [1, %d]", field(12)&0xff, most)
	}
	if t != c.config.DType {
		return errs.Errorf(op, ErrDType, "the saved sequence is of %v and the cache of %v", t, c.config.DType)
	}
	if have := c.config.scales(); scales != have {
		return errs.Errorf(op, ErrDType, "the saved sequence has %v and the cache %v", scales, have)
	}
	if edge := field(12) >> 8; edge != uint32(c.config.EdgeLayers) {
		return errs.Errorf(op, ErrShape, "EdgeLayers is %d in the saved sequence and %d in the cache", edge, c.config.EdgeLayers)
	}
	for _, x := range [...]struct {
		name string
		at   int
		have int
	}{{"Layers", 16, c.config.Layers}, {"KVHeads", 20, c.config.KVHeads}, {"HeadDim", 24, c.config.HeadDim}, {"ValueDim", 28, c.config.ValueDim}} {
		n := field(x.at)
		if inKeys := n == uint32(x.have)|savedInKeys; x.at == 28 && (inKeys || int64(n) == int64(x.have)) {
			if inKeys != c.config.ValuesInKeys {
				return errs.Errorf(op, ErrShape, "ValuesInKeys is %v in the saved sequence and %v in the cache", inKeys, c.config.ValuesInKeys)
			}
		} else if int64(n) != int64(x.have) {
			return errs.Errorf(op, ErrShape, "%s is %d in the saved sequence and %d in the cache", x.name, n, x.have)
		}
	}
	return nil
}

// transfer copies between the pages and the memory of a part. Close waits for this copy only.
func (c *Cache) transfer(op string, part *sequencePart, in bool) error {
	c.running.RLock()
	defer c.running.RUnlock()
	if c.closed {
		return errs.Errorf(op, ErrClosed, "cache")
	}
	return c.store.Transfer(op, &part.Transfer, in)
}

// chunkBytes is the most bytes of a part, unless one token has more. It is a variable for tests.
var chunkBytes = 1 << 20

// sequencePart is some tokens of a sequence in one slab of a layer, in the order of pages and in that of a saved sequence.
type sequencePart struct {
	kvstore.Transfer // memory is (KVHeads, tokens, dim) for each of runs

	tokens []byte // (tokens, KVHeads, dim), little endian
	runs   []int  // of consecutive tokens in one page: their number
	heads  int
	size   int // bytes of what has the byte order of the machine
	row    int // bytes of a head of a token
}

// eachPart visits all parts of a saved sequence that dropped the tokens gone, in order. A part is valid until visit returns. It has no spans if
// its tokens are in the gap of s.
func (s *Sequence) eachPart(gone pages.Gap, visit func(*sequencePart) error) error {
	c := &s.cache.config
	part := &sequencePart{heads: c.KVHeads}
	var tokens, memory []byte
	for part.Layer = range c.Layers {
		format, _ := c.format(part.Layer)
		for part.Slab = range format.Slabs {
			if part.size = part.Slab.DType.Size(); part.Slab.DType.Columns() > 1 {
				part.size = 1 // bytes in one order on all machines
			}
			if part.Slab.Row == 0 {
				if err := s.eachPage(gone, part, visit); err != nil {
					return err
				}
				continue
			}
			part.row = part.Slab.Row * part.Slab.DType.Size()
			most := part.tokensOf(c.PageSize)
			for from, to := 0, 0; from < s.table.Tokens; from = to {
				if from >= gone.First && from < gone.End {
					to = gone.End
					continue
				}
				to = from + min(most, s.table.Tokens-from)
				for _, g := range [...]pages.Gap{gone, s.table.Gap} { // parts end where a gap begins or ends
					if from < g.First {
						to = min(to, g.First)
					} else if from < g.End {
						to = min(to, g.End)
					}
				}
				n := (to - from) * part.heads * part.row
				tokens, memory = grown(tokens, n), grown(memory, n)
				part.tokens, part.Memory = tokens, memory
				part.place(s, from, to)
				if err := visit(part); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// eachPage visits the parts of a slab with an element for each page and KV head, as eachPart does. Pages without kept tokens have no part.
func (s *Sequence) eachPage(gone pages.Gap, part *sequencePart, visit func(*sequencePart) error) error {
	size, have := s.cache.config.PageSize, s.table.Gap
	part.row = part.size
	n := part.heads * part.row
	part.tokens, part.Memory = make([]byte, n), make([]byte, n)
	within := func(first int, g pages.Gap) bool { return first >= g.First && first+size <= g.End }
	for first := 0; first < s.table.Tokens; first += size {
		if within(first, gone) {
			continue
		}
		part.Spans, part.runs = part.Spans[:0], part.runs[:0]
		if !within(first, have) {
			page, _ := s.cache.pool.Place(&s.table, first) // also if the gap has first, and not the whole page
			part.Spans, part.runs = append(part.Spans, kvstore.Span{At: int(page) * n, N: n}), append(part.runs, 1)
		}
		if err := visit(part); err != nil {
			return err
		}
	}
	return nil
}

// tokensOf returns the number of tokens of a part: whole pages if possible.
func (p *sequencePart) tokensOf(pageSize int) int {
	n := max(chunkBytes/(p.heads*p.row), 1)
	if n > pageSize {
		n -= n % pageSize
	}
	return n
}

// grown returns n bytes, in the memory of b if it is large enough.
func grown(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n)
	}
	return b[:n]
}

// place sets the spans of the tokens [from, to) in the pages of s. Contiguous bytes are one span, across heads and pages.
func (p *sequencePart) place(s *Sequence, from, to int) {
	size, gap := s.cache.config.PageSize, s.table.Gap
	p.Spans, p.runs = p.Spans[:0], p.runs[:0]
	if from >= gap.First && from < gap.End {
		return
	}
	if from >= gap.End {
		shift := s.cache.pool.Shift(&s.table)
		from, to = from-shift, to-shift
	}
	for from < to {
		page, slot := int(s.table.Pages[from/size]), from%size
		n := min(size-slot, to-from)
		for h := range p.heads {
			next := kvstore.Span{At: ((page*p.heads+h)*size + slot) * p.row, N: n * p.row}
			if last := len(p.Spans) - 1; last >= 0 && p.Spans[last].At+p.Spans[last].N == next.At {
				p.Spans[last].N += next.N
				continue
			}
			p.Spans = append(p.Spans, next)
		}
		p.runs = append(p.runs, n)
		from += n
	}
}

// copyTokens copies between tokens and Memory: to Memory if in is true.
func (p *sequencePart) copyTokens(in bool) {
	if in && !littleEndian {
		reverseElements(p.tokens, p.size)
	}
	memory, tokens := p.Memory, p.tokens
	token := p.heads * p.row
	for _, n := range p.runs {
		for h := range p.heads {
			for i := range n {
				at := tokens[i*token+h*p.row:][:p.row]
				if in {
					copy(memory, at)
				} else {
					copy(at, memory)
				}
				memory = memory[p.row:]
			}
		}
		tokens = tokens[n*token:]
	}
	if !in && !littleEndian {
		reverseElements(p.tokens, p.size)
	}
}

// checkNumbers returns an error if elements of 8 or 4 bits are NaN, or a scale is not a positive number.
func (p *sequencePart) checkNumbers(op string) error {
	bad := -1
	switch b := p.tokens; {
	case p.Slab.Scales:
		for i := 0; i < len(b); i += 4 {
			if s := math.Float32frombits(binary.LittleEndian.Uint32(b[i:])); !(s > 0 && s <= math.MaxFloat32) {
				return errs.Errorf(op, ErrFormat, "layer %d, plane %d: scale %d is %v; it must be positive and finite", p.Layer, p.Slab.Plane, i/4, s)
			}
		}
	case p.Slab.DType == attn.E4M3:
		bad = slices.IndexFunc(b, func(x byte) bool { return half.E4M3(x).IsNaN() })
	case p.Slab.DType == attn.Q4:
		for i := 0; i < len(b); i += len(half.Q4{}) {
			if s := (*half.Q4)(b[i:]).Scale(); !(math.Abs(float64(s)) <= math.MaxFloat32) {
				return errs.Errorf(op, ErrFormat, "layer %d, plane %d: the scale of element %d is %v; it must be finite", p.Layer, p.Slab.Plane, i/len(half.Q4{}), s)
			}
		}
	case p.Slab.DType == attn.Int8:
		bad = slices.IndexFunc(b, func(x byte) bool { return half.Int8(x).IsNaN() })
	}
	if bad < 0 {
		return nil
	}
	return errs.Errorf(op, ErrFormat, "layer %d, plane %d: element %d is NaN", p.Layer, p.Slab.Plane, bad)
}

// littleEndian reports whether this machine has the byte order of saved sequences.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

func reverseElements(b []byte, size int) {
	for ; len(b) > 0; b = b[size:] {
		slices.Reverse(b[:size])
	}
}
