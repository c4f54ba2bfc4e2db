package hf

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strings"
)

const (
	// maxPickle bounds the pickle that lists a file's tensors. The pickle of a published shard has some hundred
	// kilobytes. One byte of a hostile pickle can use about 50 bytes of memory.
	maxPickle = 4 << 20
	// maxDirectory bounds the size of an archive's directory. The directory of a published shard has some tens of
	// kilobytes. One byte of a directory can use about 10 bytes of memory.
	maxDirectory = 16 << 20
	// maxRank exceeds the rank of all weights of decoders.
	maxRank = 8
)

// parseTorch lists the tensors of a file that torch.save wrote for a dictionary of tensors. The file is a zip archive,
// or has the layout before torch 1.6. The entries alias data.
func parseTorch(file string, data []byte) ([]entry, error) {
	var value any
	var err error
	if bytes.HasPrefix(data, []byte("PK")) {
		value, err = parseZip(file, data)
	} else {
		value, err = parseLegacy(file, data)
	}
	if err != nil {
		return nil, err
	}
	dict, ok := value.(pyDict)
	if !ok {
		return nil, fail(ErrFormat, file, "the pickle holds %s, not a dictionary of tensors", describe(value))
	}
	entries := make([]entry, 0, len(dict))
	for _, name := range slices.Sorted(maps.Keys(dict)) {
		v, ok := dict[name].(*view)
		if !ok {
			return nil, fail(ErrFormat, file, "%s is %s, not a tensor", quote(name), describe(dict[name]))
		}
		e, err := v.entry()
		if err != nil {
			return nil, fail(ErrFormat, file, "tensor %s: %v", quote(name), err)
		}
		e.name, e.file = name, file
		entries = append(entries, e)
	}
	return entries, nil
}

// parseZip reads a zip archive:
//
//	name/data.pkl    the pickle
//	name/data/key    the bytes of the storage of that key
//	name/byteorder   "little" (not in all versions)
//
// The records must be uncompressed, and are used in place.
func parseZip(file string, data []byte) (any, error) {
	directory := &bounded{from: bytes.NewReader(data), left: maxDirectory}
	archive, err := zip.NewReader(directory, int64(len(data)))
	directory.left = math.MaxInt // the directory has been read; single records follow
	if err != nil {
		return nil, fail(ErrFormat, file, "%v", err)
	}
	records, root := map[string]*zip.File{}, ""
	for _, r := range archive.File {
		if _, ok := records[r.Name]; ok {
			return nil, fail(ErrFormat, file, "record %s is there twice", quote(r.Name))
		}
		records[r.Name] = r
		if dir, ok := strings.CutSuffix(r.Name, "/data.pkl"); ok && !strings.Contains(dir, "/") {
			if root != "" {
				return nil, fail(ErrFormat, file, "two pickles, in %s and in %s", quote(root), quote(dir))
			}
			root = dir
		}
	}
	if _, ok := records[root+"/constants.pkl"]; ok {
		return nil, fail(ErrUnsupported, file, "a TorchScript program, not a dictionary of tensors")
	}
	read := func(name string) ([]byte, error) {
		r, ok := records[root+"/"+name]
		if !ok {
			return nil, fmt.Errorf("record %s is not in the archive", quote(root+"/"+name))
		}
		return stored(r, data)
	}
	pickle, err := read("data.pkl")
	if err != nil {
		return nil, fail(ErrFormat, file, "%v", err)
	}
	if len(pickle) > maxPickle {
		return nil, fail(ErrFormat, file, "data.pkl has %d bytes, more than the %d that a dictionary of tensors can need", len(pickle), maxPickle)
	}
	if _, ok := records[root+"/byteorder"]; ok {
		order, err := read("byteorder")
		if err != nil {
			return nil, fail(ErrFormat, file, "%v", err)
		}
		if string(order) != "little" {
			return nil, fail(ErrUnsupported, file, "byte order %s", quote(string(order)))
		}
	}

	storages := map[string]*storage{}
	value, _, err := unpickle(pickle, func(id pyTuple) (*storage, error) {
		s, err := newStorage(id)
		if err != nil {
			return nil, err
		}
		if same, ok := storages[s.key]; ok {
			return same, s.mustBe(same)
		}
		if s.data, err = read("data/" + s.key); err != nil {
			return nil, err
		}
		if held := len(s.data); s.bytes() != held {
			return nil, fmt.Errorf("%s needs %d bytes and its record has %d", describe(s), s.bytes(), held)
		}
		storages[s.key] = s
		return s, nil
	})
	if err != nil {
		return nil, fail(ErrFormat, file, "%v", err)
	}
	return value, nil
}

// bounded is a reader that fails after a given number of bytes.
type bounded struct {
	from io.ReaderAt
	left int
}

func (b *bounded) ReadAt(p []byte, at int64) (int, error) {
	if b.left -= len(p); b.left < 0 {
		return 0, fmt.Errorf("the archive's directory has more than %d bytes", maxDirectory)
	}
	return b.from.ReadAt(p, at)
}

// stored returns the bytes of an uncompressed record, in place.
func stored(r *zip.File, data []byte) ([]byte, error) {
	if r.Method != zip.Store || r.CompressedSize64 != r.UncompressedSize64 {
		return nil, fmt.Errorf("record %s is compressed, which torch does not do", quote(r.Name))
	}
	begin, err := r.DataOffset()
	if err != nil {
		return nil, fmt.Errorf("record %s: %w", quote(r.Name), err)
	}
	size := r.UncompressedSize64
	if begin < 0 || begin > int64(len(data)) || size > uint64(int64(len(data))-begin) {
		return nil, fmt.Errorf("record %s: %d bytes at %d of a file of %d", quote(r.Name), size, begin, len(data))
	}
	return data[begin : begin+int64(size) : begin+int64(size)], nil
}

// parseLegacy reads the layout before torch 1.6. The file has five pickles:
//
//   - a magic number,
//   - the protocol version,
//   - properties of the machine that wrote the file,
//   - the value,
//   - the keys of the storages, in order.
//
// After the pickles follows each storage: its number of elements in 8 bytes, and the elements.
func parseLegacy(file string, data []byte) (any, error) {
	const magic = pyLong("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19")
	storages, rest := map[string]*storage{}, data
	next := func(what string) (any, error) {
		value, n, err := unpickle(rest[:min(len(rest), maxPickle)], func(id pyTuple) (*storage, error) {
			if len(id) == 6 && id[5] != nil {
				return nil, fmt.Errorf("a storage that is a view of another one, as before torch 0.4")
			}
			s, err := newStorage(id)
			if err != nil {
				return nil, err
			}
			if same, ok := storages[s.key]; ok {
				return same, s.mustBe(same)
			}
			storages[s.key] = s
			return s, nil
		})
		if err != nil {
			return nil, fail(ErrFormat, file, "%s: %v", what, err)
		}
		rest = rest[n:]
		return value, nil
	}

	number, err := next("magic number")
	if err != nil || number != any(magic) {
		return nil, fail(ErrFormat, file, "neither a zip archive nor torch's older layout")
	}
	version, err := next("version")
	if err != nil {
		return nil, err
	}
	if version != any(int64(1001)) {
		return nil, fail(ErrUnsupported, file, "version %s of torch's older layout, not 1001", describe(version))
	}
	machine, err := next("facts on the machine")
	if err != nil {
		return nil, err
	}
	if facts, _ := machine.(pyDict); facts["little_endian"] != true {
		return nil, fail(ErrUnsupported, file, "not written by a little-endian machine")
	}
	value, err := next("value")
	if err != nil {
		return nil, err
	}
	order, err := next("keys of the storages")
	if err != nil {
		return nil, err
	}
	keys, ok := order.(*pyList)
	if !ok || len(keys.items) != len(storages) {
		return nil, fail(ErrFormat, file, "the keys of %d storages are %s", len(storages), describe(order))
	}
	for _, k := range keys.items {
		key, _ := k.(string)
		s, ok := storages[key]
		if !ok || s.data != nil {
			return nil, fail(ErrFormat, file, "%s is not the key of one storage", describe(k))
		}
		if len(rest) < 8 {
			return nil, fail(ErrFormat, file, "the file ends before storage %s", quote(key))
		}
		count := binary.LittleEndian.Uint64(rest)
		rest = rest[8:]
		if count != uint64(s.count) || s.bytes() > len(rest) {
			return nil, fail(ErrFormat, file, "%s has %d elements in a rest of %d bytes", describe(s), count, len(rest))
		}
		s.data, rest = rest[:s.bytes():s.bytes()], rest[s.bytes():]
	}
	return value, nil
}

// newStorage returns the storage of a persistent id. The id is ("storage", class, key, device, number of elements), and
// has one more item in the older layout.
func newStorage(id pyTuple) (*storage, error) {
	if (len(id) != 5 && len(id) != 6) || id[0] != "storage" {
		return nil, fmt.Errorf("a persistent id, %s, is not a storage's", describe(id))
	}
	class, _ := id[1].(pyClass)
	key, ok1 := id[2].(string)
	count, ok2 := id[4].(int64)
	d, ok3 := storageTypes[class]
	if !ok1 || !ok2 || !ok3 {
		return nil, fmt.Errorf("a storage of %s has key %s and size %s", describe(id[1]), describe(id[2]), describe(id[4]))
	}
	if count < 0 || count > math.MaxInt/8 {
		return nil, fmt.Errorf("storage %s has %d elements", quote(key), count)
	}
	return &storage{dtype: d, key: key, count: int(count)}, nil
}

// bytes returns the size of the storage according to the pickle.
func (s *storage) bytes() int { return s.count * elementBytes[s.dtype] }

func (s *storage) mustBe(same *storage) error {
	if s.dtype != same.dtype || s.count != same.count {
		return fmt.Errorf("storage %s is both %s and %s", quote(s.key), describe(s), describe(same))
	}
	return nil
}

// entry checks that the view lies within its storage, and returns the entry. A view with more elements than its storage
// is an error, since such a view repeats elements.
func (v *view) entry() (entry, error) {
	shape, ok1 := sizes(v.shape)
	stride, ok2 := sizes(v.stride)
	if !ok1 || !ok2 || len(shape) != len(stride) {
		return entry{}, fmt.Errorf("shape %s and stride %s", describe(v.shape), describe(v.stride))
	}
	count, fits := product(shape)
	if !fits || count > v.storage.count {
		return entry{}, fmt.Errorf("shape %s has more elements than its storage of %d", dims(shape), v.storage.count)
	}
	e := entry{dtype: v.storage.dtype, shape: ints(shape)}
	if count == 0 {
		return e, nil
	}
	// last is the index of the farthest element. contiguous reports whether each dimension's stride is the number of
	// elements of the dimensions after it.
	last, contiguous, inner := uint64(v.offset), true, uint64(1)
	if v.offset < 0 {
		return entry{}, fmt.Errorf("offset %d", v.offset)
	}
	for d := len(shape) - 1; d >= 0; d-- {
		hi, lo := bits.Mul64(shape[d]-1, stride[d])
		sum, carry := bits.Add64(last, lo, 0)
		if hi != 0 || carry != 0 {
			last = math.MaxUint64
			break
		}
		last = sum
		if shape[d] > 1 && stride[d] != inner {
			contiguous = false
		}
		inner *= shape[d]
	}
	if last >= uint64(v.storage.count) {
		return entry{}, fmt.Errorf("shape %s, stride %s and offset %d reach beyond a storage of %d", dims(shape), dims(stride), v.offset, v.storage.count)
	}
	if !contiguous {
		e.stride = ints(stride)
	}
	size := elementBytes[e.dtype]
	begin, end := int(v.offset)*size, (int(last)+1)*size
	e.data = v.storage.data[begin:end:end]
	return e, nil
}

// sizes converts a tuple of dimensions or strides.
func sizes(tuple pyTuple) ([]uint64, bool) {
	if len(tuple) > maxRank {
		return nil, false
	}
	s := make([]uint64, len(tuple))
	for i, d := range tuple {
		n, ok := d.(int64)
		if !ok || n < 0 || n > math.MaxInt {
			return nil, false
		}
		s[i] = uint64(n)
	}
	return s, true
}
