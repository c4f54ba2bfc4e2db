package leanattention

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// fillRandom writes random bits to all pages, NaNs of all kinds among them.
func fillRandom(c *Cache, rng *rand.Rand) {
	c.eachSlab(func(_ attn.DType, bytes []byte) {
		for i := range bytes {
			bytes[i] = byte(rng.Uint32())
		}
	})
}

// crcBitwise is CRC-32C as its definition has it.
func crcBitwise(b []byte) uint32 {
	crc := ^uint32(0)
	for _, x := range b {
		crc ^= uint32(x)
		for range 8 {
			crc = crc>>1 ^ 0x82f63b78*(crc&1)
		}
	}
	return ^crc
}

func withSum(b []byte) []byte { return binary.LittleEndian.AppendUint32(b, crcBitwise(b)) }

// savedWant is a sequence as the format's table has it.
func savedWant(s *Sequence) []byte {
	v := s.cache.testView()
	cfg := &v.config
	le := binary.LittleEndian
	b := []byte("LEANSEQ\n\x01\x00\x00\x00")
	b = le.AppendUint32(b, map[tensor.Dtype]uint32{tensor.Float32: 1, Float16: 2, BFloat16: 3}[cfg.DType])
	for _, n := range []int{cfg.Layers, cfg.KVHeads, cfg.HeadDim, cfg.ValueDim} {
		b = le.AppendUint32(b, uint32(n))
	}
	b = withSum(le.AppendUint64(b, uint64(s.table.Tokens)))
	for l := range cfg.Layers {
		for _, values := range []bool{false, true} {
			for i := range s.table.Tokens {
				for h := range cfg.KVHeads {
					slab, at, n := v.testRow(values, l, s.table.Pages[i/cfg.PageSize], h, i%cfg.PageSize)
					size := slab.DType.Size()
					b = append(b, slabBytes(*slab)[at*size:(at+n)*size]...)
				}
			}
		}
	}
	return withSum(b)
}

func saved(t interface {
	Helper()
	Fatal(...any)
}, s *Sequence) []byte {
	t.Helper()
	var b bytes.Buffer
	n, err := s.WriteTo(&b)
	if err == nil && n != int64(b.Len()) {
		t.Fatal("WriteTo says", n, "and wrote", b.Len())
	}
	noError(t, err)
	return b.Bytes()
}

// books is what a cache knows of its pages.
type books struct {
	free, holders     []int32
	sequences, tokens int
}

func booksOf(c *Cache) books {
	c.mu.Lock()
	defer c.mu.Unlock()
	free, holders := c.pool.Lists()
	return books{free, holders, c.sequences, c.tokens}
}

func (b books) equal(o books) bool {
	return slices.Equal(b.free, o.free) && slices.Equal(b.holders, o.holders) && b.sequences == o.sequences && b.tokens == o.tokens
}

// drawScattered gives a cache some sequences whose pages lie in no order, forks among
// them.
func drawScattered(t *rapid.T, c *Cache) (live []*Sequence) {
	for range rapid.IntRange(1, 12).Draw(t, "sequences") {
		if len(live) > 0 && rapid.IntRange(0, 2).Draw(t, "what") == 0 {
			i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
			if rapid.Bool().Draw(t, "fork") {
				f, err := live[i].Fork()
				noError(t, err, f.Truncate(rapid.IntRange(0, f.Len()).Draw(t, "kept")))
				live = append(live, f)
				continue
			}
			noError(t, live[i].Release())
			live = slices.Delete(live, i, i+1)
		}
		s, err := c.NewSequence()
		noError(t, err)
		Lengthen(s, rapid.IntRange(0, min(c.pool.Free()*c.config.PageSize, 40)).Draw(t, "tokens"))
		live = append(live, s)
	}
	return live
}

// readers give the same bytes in other pieces.
var readers = []func(io.Reader) io.Reader{
	func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader,
}

// What is saved is what the format says; and what another cache, of other pages in
// another place, makes of it is the same, bit for bit. Several follow each other.
func testSequenceIO(t *testing.T, places ...*device.GPU) {
	defer func(n int) { chunkBytes = n }(chunkBytes)
	rapid.Check(t, func(t *rapid.T) {
		chunkBytes = rapid.SampledFrom([]int{1, 64, 1000, 1 << 20}).Draw(t, "bytes of a part")
		config := CacheConfig{
			Layers:   rapid.IntRange(1, 3).Draw(t, "layers"),
			KVHeads:  rapid.IntRange(1, 3).Draw(t, "KV heads"),
			HeadDim:  rapid.IntRange(1, 9).Draw(t, "head dim"),
			ValueDim: rapid.IntRange(1, 9).Draw(t, "value dim"),
			DType:    rapid.SampledFrom([]tensor.Dtype{tensor.Float32, Float16, BFloat16}).Draw(t, "dtype"),
		}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "values"), 0))
		var caches [2]*Cache
		for i := range caches {
			config.PageSize = rapid.IntRange(1, 20).Draw(t, "page size")
			config.Pages = 500/config.PageSize + rapid.IntRange(0, 9).Draw(t, "pages")
			config.Device = rapid.SampledFrom(places).Draw(t, "place")
			var err error
			caches[i], err = NewCache(config)
			noError(t, err)
			defer caches[i].Close()
			fillRandom(caches[i], rng)
		}
		from, to := caches[0], caches[1]
		var stream bytes.Buffer
		var want [][]byte
		live := drawScattered(t, from)
		drawScattered(t, to)
		for _, s := range live {
			before := booksOf(from)
			got := saved(t, s)
			want = append(want, savedWant(s))
			if !bytes.Equal(got, want[len(want)-1]) {
				t.Fatalf("saved %x\nwant  %x", got, want[len(want)-1])
			}
			if !before.equal(booksOf(from)) {
				t.Fatal("WriteTo keeps pages")
			}
			stream.Write(got)
			stream.WriteString("between")
		}
		r := rapid.SampledFrom(readers).Draw(t, "reader")(bytes.NewReader(stream.Bytes()))
		for i, s := range live {
			before := to.Stats()
			loaded, err := to.ReadSequence(r)
			if need := to.pool.For(s.table.Tokens); need > before.FreePages {
				if !errors.Is(err, ErrCacheFull) || to.Stats() != before {
					t.Fatalf("%d pages of %d: %v", need, before.FreePages, err)
				}
				return
			}
			noError(t, err)
			if got := savedWant(loaded); !bytes.Equal(got, want[i]) {
				t.Fatalf("loaded %x\nwant   %x", got, want[i])
			}
			before.Tokens, before.FreePages, before.Sequences = before.Tokens+s.table.Tokens, before.FreePages-to.pool.For(s.table.Tokens), before.Sequences+1
			if after := to.Stats(); after != before {
				t.Fatalf("%+v, want %+v", after, before)
			}
			between := make([]byte, 7)
			if _, err := io.ReadFull(r, between); err != nil || string(between) != "between" {
				t.Fatalf("ReadSequence left %q, %v", between, err)
			}
		}
		before := booksOf(to)
		if _, err := to.ReadSequence(r); !errors.Is(err, ErrFormat) || !errors.Is(err, io.EOF) || !before.equal(booksOf(to)) {
			t.Fatalf("nothing left: %v", err)
		}
	})
}

func TestSequenceIO(t *testing.T) { testSequenceIO(t, nil) }

// savedSequence is a cache with one sequence, and it saved.
func savedSequence(t testing.TB, gpu *device.GPU, tokens int) (*Sequence, []byte) {
	t.Helper()
	c, err := NewCache(CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 3, ValueDim: 2, DType: Float16, PageSize: 4, Pages: 8, Device: gpu})
	noError(t, err)
	fillRandom(c, reftest.Rand(t))
	s := newTestSequence(t, c)
	Lengthen(s, tokens)
	return s, saved(t, s)
}

// The bytes of version 1, for ever.
func TestSequenceIOGolden(t *testing.T) {
	c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 1, DType: Float16, PageSize: 2, Pages: 1})
	noError(t, err)
	s := newTestSequence(t, c)
	Lengthen(s, 2)
	i := byte(0)
	c.eachSlab(func(_ attn.DType, bytes []byte) {
		for at := range bytes {
			i++
			bytes[at] = i
		}
	})
	const want = "LEANSEQ\n\x01\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00" +
		"\xc4\x84\xed\x6c\x01\x02\x05\x06\x03\x04\x07\x08\x09\x0a\x0d\x0e\x0b\x0c\x0f\x10\x2f\x3b\x6a\xdc"
	if got := string(saved(t, s)); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// Whatever byte is damaged, and wherever it ends, a saved sequence is refused, and the
// cache is as it was.
func TestReadSequenceDamaged(t *testing.T) {
	s, good := savedSequence(t, nil, 7)
	c := s.cache
	before := booksOf(c)
	refused := func(what string, data []byte, want ...error) {
		t.Helper()
		got, err := c.ReadSequence(bytes.NewReader(data))
		if got != nil || err == nil || !before.equal(booksOf(c)) {
			t.Fatalf("%s: %v, %v", what, got, err)
		}
		for _, w := range want {
			if errors.Is(err, w) {
				return
			}
		}
		t.Errorf("%s: %v, want one of %v", what, err, want)
	}
	for n := range good {
		end := io.ErrUnexpectedEOF
		if n == 0 {
			end = io.EOF
		}
		refused("cut short", good[:n], end)
		refused("cut short", good[:n], ErrFormat)
		for _, bit := range []byte{1, 0x80} {
			bad := slices.Clone(good)
			bad[n] ^= bit
			refused("one bit", bad, ErrFormat, ErrUnsupported)
		}
	}
	refused("text", []byte(strings.Repeat("text ", 100)), ErrFormat)
	refused("zeros", make([]byte, 1000), ErrFormat)
}

// forged is good with a number in its header changed, and the sums right.
func forged(good []byte, at int, value ...byte) []byte {
	b := slices.Clone(good[:headerBytes-sumBytes])
	copy(b[at:], value)
	return withSum(append(withSum(b), good[headerBytes:len(good)-sumBytes]...))
}

// A header that fits another cache says what does not fit; and no number in it makes
// anything larger than the cache.
func TestReadSequenceHeader(t *testing.T) {
	s, good := savedSequence(t, nil, 7)
	c := s.cache
	before := booksOf(c)
	ff := []byte{255, 255, 255, 255, 255, 255, 255, 255}
	for _, x := range []struct {
		at    int
		value []byte
		want  error
		text  string
	}{
		{8, []byte{3}, ErrUnsupported, "version 3; this package reads versions 1 and 2"},
		{8, ff[:4], ErrUnsupported, "version 4294967295"},
		{12, []byte{0}, ErrFormat, "element type 0"},
		{12, []byte{99}, ErrFormat, "element type 99"},
		{12, ff[:4], ErrFormat, "element type 255"},
		{13, ff[:3], ErrShape, "EdgeLayers is 16777215 in the saved sequence and 0 in the cache"},
		{12, []byte{1}, ErrDType, "float32 and the cache of Float16"},
		{12, []byte{3}, ErrDType, "BFloat16 and the cache of Float16"},
		{16, []byte{3}, ErrShape, "Layers is 3 in the saved sequence and 2 in the cache"},
		{20, []byte{1}, ErrShape, "KVHeads is 1 in the saved sequence and 2 in the cache"},
		{24, []byte{2}, ErrShape, "HeadDim is 2 in the saved sequence and 3 in the cache"},
		{28, []byte{3}, ErrShape, "ValueDim is 3 in the saved sequence and 2 in the cache"},
		{28, ff[:4], ErrShape, "ValueDim is 4294967295"},
		{32, []byte{25}, ErrCacheFull, "7 pages of 4 tokens needed for 25 tokens, 6 of 8 free"},
		{32, ff, ErrLength, "4611686018427387904 pages"},
		{32, []byte{0, 0, 0, 0, 0, 0, 0, 128}, ErrLength, "2305843009213693952 pages"},
		{32, []byte{0, 0, 0, 0, 1}, ErrLength, "1073741824 pages"},
		{32, []byte{24}, io.ErrUnexpectedEOF, "ends after"},
		{32, []byte{6}, ErrFormat, "the sum of the data"},
	} {
		var m [2]runtime.MemStats
		runtime.ReadMemStats(&m[0])
		_, err := c.ReadSequence(bytes.NewReader(forged(good, x.at, x.value...)))
		runtime.ReadMemStats(&m[1])
		if !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.text) || !strings.HasPrefix(err.Error(), "leanattention: ReadSequence: ") {
			t.Errorf("%d %v: %v, want %v with %q", x.at, x.value, err, x.want, x.text)
		}
		if n := m[1].TotalAlloc - m[0].TotalAlloc; n > 1<<16 {
			t.Errorf("%d %v: %d bytes allocated", x.at, x.value, n)
		}
		if !before.equal(booksOf(c)) {
			t.Fatalf("%d %v: the cache has changed", x.at, x.value)
		}
	}
}

// A long sequence takes the memory of a part, not its own, and so does a large page.
func TestSequenceIOMemory(t *testing.T) {
	for _, pageSize := range []int{16, 1 << 13} {
		c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 8, HeadDim: 128, PageSize: pageSize, Pages: 1 << 14 / pageSize})
		noError(t, err)
		s := newTestSequence(t, c)
		Lengthen(s, 1<<12) // 16 MB of keys, and as much of values
		r, w := io.Pipe()
		var m [2]runtime.MemStats
		runtime.ReadMemStats(&m[0])
		done := make(chan error)
		go func() {
			_, err := s.WriteTo(w)
			done <- err
		}()
		loaded, err := c.ReadSequence(r)
		noError(t, err, <-done)
		runtime.ReadMemStats(&m[1])
		if n := m[1].TotalAlloc - m[0].TotalAlloc; n > 8<<20 {
			t.Errorf("pages of %d: %d bytes allocated", pageSize, n)
		}
		noError(t, loaded.Release(), c.Close())
	}
}

// failingWriter fails after n bytes; without an error it writes less than it is given.
type failingWriter struct {
	n   int
	err error
}

func (w *failingWriter) Write(b []byte) (int, error) {
	n := min(w.n, len(b))
	w.n -= n
	if n < len(b) {
		return n, w.err
	}
	return n, nil
}

// An error of the writer or the reader is passed on, wherever it comes.
func TestSequenceIOPassesErrorsOn(t *testing.T) {
	s, good := savedSequence(t, nil, 7)
	before := booksOf(s.cache)
	disk := errors.New("disk full")
	for n := range good {
		for _, err := range []error{disk, nil} {
			want := err
			if err == nil {
				want = io.ErrShortWrite
			}
			wrote, err := s.WriteTo(&failingWriter{n, err})
			if !errors.Is(err, want) || wrote != int64(n) {
				t.Fatalf("a writer that fails after %d bytes: %d, %v", n, wrote, err)
			}
		}
		_, err := s.cache.ReadSequence(io.MultiReader(bytes.NewReader(good[:n]), iotest.ErrReader(disk)))
		if !errors.Is(err, disk) || errors.Is(err, ErrFormat) {
			t.Fatalf("a reader that fails after %d bytes: %v", n, err)
		}
		if !before.equal(booksOf(s.cache)) {
			t.Fatal("the cache has changed")
		}
	}
}

// Calls out of order.
func TestSequenceIOStates(t *testing.T) {
	s, good := savedSequence(t, nil, 7)
	c := s.cache
	wrong := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	write := func(s *Sequence) error {
		n, err := s.WriteTo(io.Discard)
		if n != 0 {
			t.Errorf("%d bytes written", n)
		}
		return err
	}
	read := func(c *Cache) error {
		_, err := c.ReadSequence(bytes.NewReader(good))
		return err
	}
	wrong("no sequence", write(nil), ErrState)
	wrong("new(Sequence)", write(new(Sequence)), ErrState)
	wrong("no cache", read(nil), ErrState)
	wrong("new(Cache)", read(new(Cache)), ErrState)
	_, err := s.WriteTo(nil)
	wrong("no writer", err, ErrState)
	_, err = c.ReadSequence(nil)
	wrong("no reader", err, ErrState)

	step, err := c.NewStep(3)
	noError(t, err)
	other, err := s.Fork()
	noError(t, err, step.Set([]Append{{Seq: s, Tokens: 1}}))
	wrong("an open step", write(s), ErrState)
	if !bytes.Equal(saved(t, other), good) {
		t.Error("a fork is saved as something else while a step is open")
	}
	noError(t, step.Rollback(), other.Release())

	full := newTestSequence(t, c)
	Lengthen(full, 20)
	wrong("full", read(c), ErrCacheFull)
	noError(t, full.Release())
	noError(t, read(c), s.Release())
	wrong("released", write(s), ErrClosed)

	last := newTestSequence(t, c)
	Lengthen(last, 3)
	noError(t, c.Close())
	wrong("closed", write(last), ErrClosed)
	wrong("closed", read(c), ErrClosed)
}

// during calls f before the nth write or read.
type during struct {
	io.Writer
	io.Reader
	n int
	f func()
}

func (d *during) step() {
	if d.n--; d.n == 0 {
		d.f()
	}
}
func (d *during) Write(b []byte) (int, error) { d.step(); return d.Writer.Write(b) }
func (d *during) Read(b []byte) (int, error)  { d.step(); return d.Reader.Read(b) }

// While a writer is slow the sequence may be changed, and what is saved is what it was.
func TestWriteToWhileItChanges(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, s *Sequence){
		"released":  func(t *testing.T, s *Sequence) { noError(t, s.Release()) },
		"truncated": func(t *testing.T, s *Sequence) { noError(t, s.Truncate(1)) },
		"appended": func(t *testing.T, s *Sequence) {
			step, err := s.cache.NewStep(1)
			noError(t, err, step.Set([]Append{{Seq: s, Tokens: 1}}))
			if p := step.reservations[0].Pages; p[1] == s.table.Pages[1] {
				t.Error("an append writes a page that is being saved")
			}
			noError(t, step.Rollback())
		},
		"forked": func(t *testing.T, s *Sequence) {
			f, err := s.Fork()
			noError(t, err, s.Release(), f.Truncate(5), f.Release())
		},
	} {
		for n := 1; n < 6; n++ {
			s, good := savedSequence(t, nil, 7)
			c := s.cache
			var b bytes.Buffer
			_, err := s.WriteTo(&during{Writer: &b, n: n, f: func() {
				change(t, s)
				// Free pages are anybody's.
				PoisonFree(c)
			}})
			noError(t, err)
			if !bytes.Equal(b.Bytes(), good) {
				t.Errorf("%s before write %d: something else was saved", name, n)
			}
			if s.released {
				if st := c.Stats(); st.FreePages != c.config.Pages || st.Sequences != 0 || st.Tokens != 0 {
					t.Errorf("%s before write %d: %+v", name, n, st)
				}
			}
		}
	}
}

// A cache that is closed meanwhile is closed, and nobody waits for anybody.
func TestSequenceIOWhileClosed(t *testing.T) {
	for n := 1; n < 6; n++ {
		s, good := savedSequence(t, nil, 7)
		_, err := s.WriteTo(&during{Writer: io.Discard, n: n, f: func() { noError(t, s.cache.Close()) }})
		if !errors.Is(err, ErrClosed) && n < 5 {
			t.Errorf("closed before write %d: %v", n, err)
		}
		s, _ = savedSequence(t, nil, 7)
		_, err = s.cache.ReadSequence(&during{Reader: bytes.NewReader(good), n: n, f: func() { noError(t, s.cache.Close()) }})
		if !errors.Is(err, ErrClosed) {
			t.Errorf("closed before read %d: %v", n, err)
		}
	}
}

// A reader that panics is its owner's affair; pages come back.
func TestReadSequencePanic(t *testing.T) {
	s, good := savedSequence(t, nil, 7)
	before := booksOf(s.cache)
	func() {
		defer func() {
			if recover() != "reader" {
				t.Error("the panic is gone")
			}
		}()
		_, _ = s.cache.ReadSequence(&during{Reader: bytes.NewReader(good), n: 5, f: func() { panic("reader") }})
	}()
	if !before.equal(booksOf(s.cache)) {
		t.Error("the cache has changed")
	}
}

// Elements of another byte order turn round, and back.
func TestReverseElements(t *testing.T) {
	for size, want := range map[int]string{2: "badcfehg", 4: "dcbahgfe"} {
		b := []byte("abcdefgh")
		if reverseElements(b, size); string(b) != want {
			t.Errorf("%d bytes: %s", size, b)
		}
	}
}

// savedEight is a type of 8 or 4 bits and its scales by the number in saved sequences.
func savedEight(n byte) (tensor.Dtype, Scales) {
	if n == 10 {
		return Q4, 0
	}
	return []tensor.Dtype{E4M3, tensor.Int8}[n%2], Scales(n/2-2) % 3
}

// FuzzReadSequence gives a cache data that may begin as a saved sequence: it is
// refused and the cache as it was, or it is what WriteTo writes.
func FuzzReadSequence(f *testing.F) {
	_, good := savedSequence(f, nil, 7)
	_, empty := savedSequence(f, nil, 0)
	f.Add(good, false)
	f.Add(empty, true)
	f.Add(good[:60], true)
	f.Add(forged(good, 32, 255, 255, 255, 255, 255, 255, 255, 255), false)
	withGap := slices.Concat(good[:8], []byte{savedWithGap}, good[9:40], []byte{1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0}, good[40:headerBytes+4*40+sumBytes]) // four tokens of 40 bytes are left
	f.Add(withGap, true)
	for i := range byte(8) {
		config := CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 3, ValueDim: 2, PageSize: 3, Pages: 2}
		if config.DType, config.Scales = savedEight(4 + min(i, 6)); config.DType == Q4 {
			config.HeadDim, config.ValueDim = 64, 32
		}
		if i == 7 {
			config.Layers, config.EdgeLayers = 3, 1
		}
		c, err := NewCache(config)
		noError(f, err)
		c.eachSlab(func(_ attn.DType, b []byte) {
			for i := range b {
				b[i] = byte(i%97 + 1) // no NaN, and scales are positive
			}
		})
		s := newTestSequence(f, c)
		Lengthen(s, 5)
		f.Add(saved(f, s), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, sums bool) {
		config := CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 3, ValueDim: 2, DType: Float16, PageSize: 3, Pages: 5}
		head := headerBytes
		if len(data) > 12 && data[12] > 3 {
			if config.DType, config.Scales = savedEight(data[12]); config.DType == Q4 {
				config.HeadDim, config.ValueDim = 64, 32
			}
			if len(data) > 13 && data[13] == 1 {
				config.Layers, config.EdgeLayers = 3, 1
			}
		}
		if len(data) > 8 && data[8] == savedWithGap {
			head, config.Window, config.SinkTokens, config.Pages = head+gapBytes, 3, 1, 2*config.Pages
		}
		if n := len(data) - sumBytes; sums && n > head { // sums that are right let more through
			data = withSum(append(withSum(slices.Clone(data[:head-sumBytes])), data[head:n]...))
		} else if sums && n == head {
			data = withSum(withSum(slices.Clone(data[:head-sumBytes])))
		}
		c, err := NewCache(config)
		noError(t, err)
		before := booksOf(c)
		r := bytes.NewReader(data)
		s, err := c.ReadSequence(r)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "leanattention: ReadSequence: ") || !before.equal(booksOf(c)) {
				t.Fatalf("%v; %+v", err, c.Stats())
			}
			return
		}
		got := saved(t, s)
		if config.Window > 0 { // the cache keeps no more than its window: that may be less than there was
			again, err := c.ReadSequence(bytes.NewReader(got))
			noError(t, err)
			if twice := saved(t, again); !bytes.Equal(twice, got) {
				t.Fatalf("read %x\nsaved %x", got, twice)
			}
			return
		}
		if !bytes.Equal(got, data[:len(data)-r.Len()]) {
			t.Fatalf("read %x\nsaved %x", data, got)
		}
	})
}
