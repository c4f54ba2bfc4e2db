package gguf

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"math/bits"
	"slices"
	"sync"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder/internal/mapped"
)

const (
	// maxName is the maximum length of a tensor's name in the format.
	maxName = 64
	// maxDims is the maximum number of dimensions in the format.
	maxDims = 4
	// maxTensors bounds the memory of a file's list of tensors. The largest models have some thousands.
	maxTensors = 1 << 17

	defaultAlignment = 32
	maxAlignment     = 1 << 20
	alignmentKey     = "general.alignment"
)

// File is an open GGUF file, or the open files of a split model. The methods of a File, of its metadata and of its
// tensors are safe for concurrent use.
type File struct {
	meta    *Metadata
	tensors []*Tensor
	byName  map[string]*Tensor
	parts   []*part
	use     *use
}

// part is one file: a whole model, or one part of a split model.
type part struct {
	path    string
	file    *mapped.File // nil: data is memory of the caller
	version uint32
	meta    *Metadata
	tensors []*Tensor
}

// Open opens a GGUF file. If the file is the first of a split model, Open also opens the others, which must be in the
// same folder.
func Open(path string) (*File, error) {
	u := &use{}
	first, err := openPart(path, u)
	if err != nil {
		return nil, err
	}
	return assemble(first, u)
}

// Parse reads a GGUF file from memory. The caller must not change data while the File is in use. name stands for the
// file in errors.
func Parse(name string, data []byte) (*File, error) {
	u := &use{}
	p, err := parse(name, data, u)
	if err != nil {
		return nil, err
	}
	return assemble(p, u)
}

func openPart(path string, u *use) (*part, error) {
	m, err := mapped.Open(path)
	switch {
	case errors.Is(err, mapped.ErrIrregular):
		return nil, fail(ErrFormat, path, "%v", err)
	case errors.Is(err, mapped.ErrTooLong):
		return nil, fail(ErrUnsupported, path, "%v", err)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fail(ErrMissing, path, "there is no such file")
	case err != nil:
		return nil, fail(ErrMissing, path, "%v", err)
	}
	p, err := parse(path, m.Bytes(), u)
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	p.file = m
	for _, t := range p.tensors {
		t.mapping = m
	}
	return p, nil
}

func (p *part) close() error {
	if p.file == nil {
		return nil
	}
	return p.file.Close()
}

// parse reads the header, the metadata and the list of tensors.
func parse(name string, data []byte, u *use) (p *part, err error) {
	err = u.do(name, func() error {
		c := &cursor{file: name, data: data}
		p = c.part(u)
		return c.err
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (c *cursor) part(u *use) *part {
	p := &part{path: c.file}
	switch magic := c.data[:min(4, len(c.data))]; {
	case string(magic) == "GGUF":
	case bytes.HasPrefix(c.data, []byte("version https://git-lfs.github.com/spec/")):
		c.fail(ErrMissing, "a Git LFS pointer and not the file itself, which git lfs pull gets")
	case string(magic) == "tjgg" || string(magic) == "fmgg" || string(magic) == "lmgg" || string(magic) == "algg":
		c.fail(ErrUnsupported, "the file has a format older than GGUF: convert the model again")
	default:
		c.fail(ErrFormat, "the file begins with %q, a GGUF file with \"GGUF\"", magic)
	}
	c.bytes(4, "the magic")
	p.version = c.uint32("the version")
	switch {
	case c.err != nil:
	case p.version == 2 || p.version == 3:
	case p.version&0xffff == 0 && p.version != 0:
		c.fail(ErrUnsupported, "the file is big endian (version %d): llama.cpp's gguf_convert_endian.py makes it little endian", bits.ReverseBytes32(p.version))
	default:
		c.fail(ErrUnsupported, "version %d; versions 2 and 3 are read", p.version)
	}
	tensors, keys := c.uint64("the number of tensors"), c.uint64("the number of metadata keys")
	p.meta = readMetadata(c, keys)
	p.meta.use = u
	if c.err != nil {
		return nil
	}
	alignment := c.alignment(p.meta)
	c.infos(p, tensors, u)
	if c.err != nil {
		return nil
	}
	c.place(p, alignment)
	return p
}

// alignment returns general.alignment.
func (c *cursor) alignment(m *Metadata) int {
	const key = alignmentKey
	v := m.values[key]
	if v == nil {
		return defaultAlignment
	}
	v.read.Store(true)
	if !isInteger(v.kind) {
		c.fail(ErrType, "metadata key %q is %v; an integer is wanted", key, v)
		return 0
	}
	n, err := integer(c.file, key, v.kind, v.data)
	switch {
	case err != nil:
		c.err = cmp.Or(c.err, err)
	case n <= 0 || n&(n-1) != 0 || n > maxAlignment:
		c.fail(ErrFormat, "metadata key %q is %d; a power of two up to %d is wanted", key, n, maxAlignment)
	}
	return n
}

// infos reads the list of n tensors.
func (c *cursor) infos(p *part, n uint64, u *use) {
	const least = 8 + 1 + 4 + 4 + 8 // bytes of the smallest info: a name of one byte, no dimensions, type, offset
	switch {
	case n > uint64(c.left())/least:
		c.fail(ErrFormat, "%d tensors are claimed, more than %d bytes can list", n, c.left())
	case n > maxTensors:
		c.fail(ErrUnsupported, "%d tensors; at most %d are read", n, maxTensors)
	}
	for i := uint64(0); i < n && c.err == nil; i++ {
		name := c.string(maxName, "the name of a tensor")
		if c.err == nil && (len(name) == 0 || !utf8.Valid(name)) {
			c.fail(ErrFormat, "tensor %d has the name %s, which is empty or not UTF-8", i, quote(name))
		}
		t := &Tensor{file: c.file, name: string(name), use: u}
		c.info(t)
		p.tensors = append(p.tensors, t)
	}
}

// info reads the dimensions, the type and the offset of a tensor. The name has been read.
func (c *cursor) info(t *Tensor) {
	dims := c.uint32("the number of a tensor's dimensions")
	if dims > maxDims {
		c.fail(ErrFormat, "tensor %s has %d dimensions; at most %d are possible", quote(t.name), dims, maxDims)
	}
	if c.err != nil {
		return
	}
	t.shape = make([]int, dims)
	count := uint64(1)
	for i := range t.shape {
		n := c.uint64("a dimension of a tensor")
		if c.err != nil {
			return
		}
		hi, lo := bits.Mul64(count, n)
		if n == 0 || hi != 0 || lo > math.MaxInt64/8 { // an element of any type has at most 8 bytes
			c.fail(ErrFormat, "tensor %s: dimension %d of %d is %d: the elements are none, or too many", quote(t.name), i, dims, n)
			return
		}
		if lo > math.MaxInt {
			c.fail(ErrUnsupported, "tensor %s has %d elements and more, which no slice of this machine can have", quote(t.name), lo)
			return
		}
		count = lo
		t.shape[len(t.shape)-1-i] = int(n) // the file has the innermost dimension first
	}
	t.typ = Type(c.uint32("the type of a tensor"))
	t.offset = c.uint64("the offset of a tensor")
	if c.err != nil {
		return
	}
	l, ok := layouts[t.typ]
	if !ok {
		c.fail(ErrUnsupported, "tensor %s has type %v; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K are read", quote(t.name), t.typ)
		return
	}
	t.layout, t.columns = l, 1
	if dims > 0 {
		t.columns = t.shape[dims-1]
	}
	if t.columns%l.elements != 0 {
		c.fail(ErrFormat, "tensor %s has rows of %d elements, and %v has blocks of %d", quote(t.name), t.columns, t.typ, l.elements)
		return
	}
	t.size = count / uint64(l.elements) * uint64(l.bytes)
}

// place sets each tensor's data to the bytes at the tensor's offset.
func (c *cursor) place(p *part, alignment int) {
	if len(p.tensors) == 0 {
		return
	}
	start := uint64(c.at+alignment-1) / uint64(alignment) * uint64(alignment)
	if start > uint64(len(c.data)) {
		c.fail(ErrFormat, "the data would begin at byte %d, and the file has %d", start, len(c.data))
		return
	}
	data := c.data[start:]
	order := slices.Clone(p.tensors)
	slices.SortFunc(order, func(a, b *Tensor) int { return cmp.Compare(a.offset, b.offset) })
	end := uint64(0)
	for i, t := range order {
		switch {
		case t.offset%uint64(alignment) != 0:
			c.fail(ErrFormat, "tensor %s begins at byte %d of the data, no multiple of the alignment %d", quote(t.name), t.offset, alignment)
		case t.offset > uint64(len(data)) || t.size > uint64(len(data))-t.offset:
			c.fail(ErrFormat, "tensor %s has %d bytes at byte %d of the data, and the data have %d", quote(t.name), t.size, t.offset, len(data))
		case t.offset < end:
			c.fail(ErrFormat, "tensors %s and %s overlap", quote(order[i-1].name), quote(t.name))
		}
		if c.err != nil {
			return
		}
		end = t.offset + t.size
		t.data = data[t.offset:end:end]
		t.rows = len(t.data) / t.RowBytes()
	}
}

// use keeps Close from unmapping a file's bytes while they are read.
type use struct {
	sync.RWMutex
	closed bool
	holds  int // calls of File.Hold that were not released
}

// do calls f, which reads the file's bytes, in the caller's goroutine.
func (u *use) do(file string, f func() error) error {
	u.RLock()
	defer u.RUnlock()
	if u.closed {
		return fail(ErrClosed, file, "read after Close")
	}
	err := mapped.Catch(f)
	if errors.Is(err, mapped.ErrGone) {
		return fail(ErrMissing, file, "another program has cut the file, or its disk has failed: %v", err)
	}
	return err
}

// Metadata returns the metadata. The metadata of a split model is that of its first file.
func (f *File) Metadata() *Metadata { return f.meta }

// Version returns the version of the format.
func (f *File) Version() int { return int(f.parts[0].version) }

// Paths returns the paths of the model's files.
func (f *File) Paths() []string {
	paths := make([]string, len(f.parts))
	for i, p := range f.parts {
		paths[i] = p.path
	}
	return paths
}

// Tensors returns all tensors in the order of the files.
func (f *File) Tensors() []*Tensor { return slices.Clone(f.tensors) }

// Tensor returns the tensor with the given name, or ErrMissing.
func (f *File) Tensor(name string) (*Tensor, error) {
	t := f.byName[name]
	if t == nil {
		return nil, fail(ErrMissing, f.parts[0].path, "tensor %s", quote(name))
	}
	return t, nil
}

// Hold keeps the bytes that Tensor.Blocks returns valid until release is called, once, also after Close.
func (f *File) Hold() (release func() error, err error) {
	f.use.Lock()
	defer f.use.Unlock()
	if f.use.closed {
		return nil, fail(ErrClosed, f.parts[0].path, "Hold")
	}
	f.use.holds++
	return func() error {
		f.use.Lock()
		defer f.use.Unlock()
		f.use.holds--
		return f.closeParts()
	}, nil
}

// Close releases the files. All other methods then return ErrClosed.
func (f *File) Close() error {
	f.use.Lock()
	defer f.use.Unlock()
	if f.use.closed {
		return fail(ErrClosed, f.parts[0].path, "Close")
	}
	f.use.closed = true
	return f.closeParts()
}

// closeParts closes the files if File is closed and nothing holds the bytes. The caller has locked f.use.
func (f *File) closeParts() error {
	if !f.use.closed || f.use.holds > 0 {
		return nil
	}
	var errs []error
	for _, p := range f.parts {
		if err := p.close(); err != nil {
			errs = append(errs, fail(ErrFormat, p.path, "%v", err))
		}
	}
	return errors.Join(errs...)
}

var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1
