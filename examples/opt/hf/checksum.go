package hf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

const (
	// allOf is the largest number of bytes of weights that a checksum covers whole.
	allOf = 64 << 20
	// Of a larger model's weight that is not wanted whole, pagesOf pages of pageSize bytes are read.
	pagesOf, pageSize = 8, 4096
	// block is the number of bytes that a thread sums at a time.
	block = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksums returns a line for each of [Config.Weights]: its name, shape and type, and a CRC-32C. Two folders with
// equal lines have the same weights, as far as the checksums go:
//
//   - They cover all elements in a model of up to 64 MB, and otherwise of the weights for which whole returns true.
//   - For any other weight they cover its first and its last 4 KB, and six pieces of 4 KB between these. So a weight
//     of another training differs; a single wrong element may be missed.
//
// All threads read. Errors are ErrClosed, ErrMissing and ErrShape.
func (f *Folder) Checksums(whole func(Weight) bool) ([]string, error) {
	return f.checksums(whole, allOf)
}

func (f *Folder) checksums(whole func(Weight) bool, allOf int64) (lines []string, err error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.closed {
		return nil, fail(ErrClosed, f.dir, "checksums were asked for")
	}
	weights := slices.Collect(f.config.Weights())
	entries, total := make([]entry, len(weights)), int64(0)
	for i, w := range weights {
		if entries[i], err = f.find(w.Name, w.Shape); err != nil {
			return nil, err
		}
		total += int64(len(entries[i].data))
	}
	// Pieces of one weight are consecutive, and so are the sums of a weight.
	type piece struct {
		entry    int
		from, to int
		read     bool // read from the file, not through the mapping
	}
	var pieces []piece
	for i, e := range entries {
		n := len(e.data)
		if total <= allOf || n <= pagesOf*pageSize || whole(weights[i]) {
			for at := 0; at < n; at += block {
				pieces = append(pieces, piece{i, at, min(at+block, n), false})
			}
			continue
		}
		for p := range pagesOf {
			at := (n - pageSize) / (pagesOf - 1) * p
			if p == pagesOf-1 {
				at = n - pageSize
			}
			pieces = append(pieces, piece{i, at, at + pageSize, true})
		}
	}
	sums, errs := make([]uint32, len(pieces)), make([]error, len(pieces))
	var next atomic.Int64
	var work sync.WaitGroup
	for range max(runtime.GOMAXPROCS(0), 4) { // disks serve several reads at once
		work.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(pieces) {
					return
				}
				p := pieces[i]
				e := &entries[p.entry]
				data := e.data[p.from:p.to]
				if p.read {
					data, errs[i] = f.reread(e, data)
				}
				sums[i] = crc32.Checksum(data, castagnoli)
			}
		})
	}
	work.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for i, w := range weights {
		var all []byte
		for len(pieces) > 0 && pieces[0].entry == i {
			all = binary.LittleEndian.AppendUint32(all, sums[0])
			pieces, sums = pieces[1:], sums[1:]
		}
		e := entries[i]
		line := fmt.Sprintf("%s %v %s %08x", w.Name, w.Shape, e.dtype, crc32.Checksum(all, castagnoli))
		if e.stride != nil {
			line += fmt.Sprint(" strides ", e.stride)
		}
		lines = append(lines, line)
	}
	return lines, nil
}

// reread returns a few bytes of a weight, read from its file. Through a mapping the system would read 2 MB around
// them.
func (f *Folder) reread(e *entry, data []byte) ([]byte, error) {
	first := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	for _, file := range f.files {
		begin := uintptr(unsafe.Pointer(unsafe.SliceData(file.data)))
		if file.at == nil || first < begin || first+uintptr(len(data)) > begin+uintptr(len(file.data)) {
			continue
		}
		read := make([]byte, len(data))
		if _, err := file.at.ReadAt(read, int64(first-begin)); err != nil {
			return nil, fail(ErrMissing, file.path, "%d bytes of weight %s: %v", len(data), quote(e.name), cause(err))
		}
		return read, nil
	}
	return data, nil // not a part of a file
}
