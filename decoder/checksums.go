package decoder

import (
	"fmt"
	"hash/crc32"
	"unsafe"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

const (
	wholeChecksums = 16 << 20 // elements of all weights up to which checksums read everything
	checkedRows    = 8        // of each weight of a larger model
)

// Checksums returns lines that are the same for the same model: of the configuration, the tokenizer, and each weight with its
// adapters. Processes that compute together compare them: see ranks.Join. Of models of more than 16 Mi elements, a matrix has a
// checksum of eight rows. So weights of another training differ, and a single wrong element may be missed.
func (m *Model) Checksums() (lines []string, err error) {
	weights, err := checksums(m.network, m.weights())
	if err != nil {
		return nil, fileError(err)
	}
	return append(m.identity(), weights...), nil
}

// identity returns lines that are the same for the same configuration and tokenizer.
func (m *Model) identity() []string {
	lines := []string{fmt.Sprintf("configuration: %08x", crc32.Checksum(m.config, castagnoli))}
	if m.tokenizer != nil {
		lines = append(lines, fmt.Sprintf("tokenizer: %08x", m.tokenizer.Checksum()))
	}
	return lines
}

// checksums returns a line for each tensor that has weights of a network.
func checksums(n Network, from Weights) (lines []string, err error) {
	total := 0
	for w := range tensors(n) {
		total += tensor.Shape(w.Shape).TotalSize()
	}
	for w := range tensors(n) {
		sum, n := uint32(0), w.Shape[0]
		add := func(first, end int) error {
			t, err := part(from, &Weight{Name: w.Name, Shape: w.Shape}, tensor.Dtype{}, first, end-first)
			if err == nil {
				var data []byte
				if data, err = bytesOf(t); err == nil {
					sum = crc32.Update(sum, castagnoli, data)
				}
			}
			return err
		}
		if total <= wholeChecksums || n <= checkedRows || len(w.Shape) == 1 {
			err = add(0, n)
		} else {
			for i := 0; i < checkedRows && err == nil; i++ {
				row := int(int64(n-1) * int64(i) / (checkedRows - 1))
				err = add(row, row+1)
			}
		}
		if err != nil {
			return nil, err
		}
		lines = append(lines, fmt.Sprintf("weight %s: %08x", w.Name, sum))
	}
	return lines, nil
}

// bytesOf returns the memory of a tensor.
func bytesOf(t *tensor.Dense) ([]byte, error) {
	switch x := t.Data().(type) {
	case []float32:
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x)), nil
	case []la.F16:
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 2*len(x)), nil
	case []la.BF16:
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 2*len(x)), nil
	}
	return nil, fmt.Errorf("decoder: elements of %v: %w", t.Dtype(), ErrUnsupported)
}
