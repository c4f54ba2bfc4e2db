package operand

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"gorgonia.org/leanattention/internal/errs"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// SumBytes is the size of a checksum in a saved format.
const SumBytes = 4

// Checksum returns the checksum of saved formats, CRC-32C.
func Checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// SumWriter writes a saved format, counts its bytes, and computes their checksum. Op is the operation for errors.
type SumWriter struct {
	W   io.Writer
	Op  string
	N   int64
	Sum uint32
}

// Write writes all of b, or returns an error.
func (w *SumWriter) Write(b []byte) error {
	n, err := w.W.Write(b)
	n = min(max(n, 0), len(b))
	w.N += int64(n)
	w.Sum = crc32.Update(w.Sum, castagnoli, b[:n])
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("leanattention: %s: after %d bytes: %w", w.Op, w.N, err)
	}
	return nil
}

// SumReader reads a saved format, counts its bytes, and computes their checksum.
type SumReader struct {
	R   io.Reader
	Op  string
	N   int64
	Sum uint32
}

// Read reads all of b, or returns an error.
func (r *SumReader) Read(b []byte) error {
	n, err := io.ReadFull(r.R, b)
	r.N += int64(n)
	r.Sum = crc32.Update(r.Sum, castagnoli, b[:n])
	switch {
	case err == nil:
		return nil
	case err == io.EOF && r.N > 0:
		err = io.ErrUnexpectedEOF
	case err != io.EOF && err != io.ErrUnexpectedEOF:
		return fmt.Errorf("leanattention: %s: after %d bytes: %w", r.Op, r.N, err)
	}
	return fmt.Errorf("leanattention: %s: it ends after %d bytes: %w: %w", r.Op, r.N, errs.ErrFormat, err)
}

// Check reads a checksum, and compares it with that of all bytes before.
func (r *SumReader) Check(of string) error {
	want := r.Sum
	var b [SumBytes]byte
	if err := r.Read(b[:]); err != nil {
		return err
	}
	if got := binary.LittleEndian.Uint32(b[:]); got != want {
		return errs.Errorf(r.Op, errs.ErrFormat, "the sum of %s is %08x and should be %08x: it is damaged", of, got, want)
	}
	return nil
}
