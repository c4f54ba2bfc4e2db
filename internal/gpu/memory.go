package gpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
)

// Memory is elements in the memory of a GPU.
type Memory struct {
	Buffer *cuda.Buffer
	Offset int64 // bytes; the address must be a multiple of 16
	DType  attn.DType
	Len    int // elements
}

// Address is that of element 0.
func (m *Memory) Address() uint64 { return m.Buffer.Address() + uint64(m.Offset) }

// Check reports whether m is memory of at least so many elements of a type that
// kernels know.
func (m *Memory) Check(op, name string, elements int) error {
	return m.check(op, name, elements, 16, IsTensor)
}

// CheckStored is Check of keys and values of a cache, which may have a type of [Eights], or Q4.
func (m *Memory) CheckStored(op, name string, elements int) error {
	return m.check(op, name, elements, 16, Known)
}

// CheckLoose is Check of what kernels read and write by elements: it may be at any of them.
func (m *Memory) CheckLoose(op, name string, elements int) error {
	return m.check(op, name, elements, uint64(m.DType.Size()), IsTensor)
}

func (m *Memory) check(op, name string, elements int, align uint64, known func(attn.DType) bool) error {
	switch size := int64(m.DType.Size()); {
	case m.Buffer == nil:
		return Errorf(op, attn.ErrShape, "%s has no buffer", name)
	case !known(m.DType):
		return Errorf(op, attn.ErrDType, "%s is %v", name, m.DType)
	case m.Len < elements:
		return Errorf(op, attn.ErrShape, "%s has %d elements of %d", name, m.Len, elements)
	case m.Offset < 0 || m.Offset > m.Buffer.Len() || int64(m.Len) > (m.Buffer.Len()-m.Offset)/size:
		return Errorf(op, attn.ErrShape, "%s has %d elements at byte %d of a buffer of %d bytes", name, m.Len, m.Offset, m.Buffer.Len())
	case m.Address()%align != 0:
		return Errorf(op, attn.ErrShape, "%s is at byte %d of its buffer; kernels need a multiple of %d", name, m.Offset, align)
	}
	return nil
}

// CheckFloats is Check of what has to be float32.
func (m *Memory) CheckFloats(op, name string, elements int) error {
	if m.DType != attn.Float32 {
		return Errorf(op, attn.ErrDType, "%s is %v; it must be %v", name, m.DType, attn.Float32)
	}
	return m.Check(op, name, elements)
}

// CheckOptional is CheckFloats of what may be left out.
func (m *Memory) CheckOptional(op, name string, elements int) error {
	if m.Buffer == nil {
		return nil
	}
	return m.CheckFloats(op, name, elements)
}

// AddressOr0 is the address, 0 of what is left out.
func (m *Memory) AddressOr0() uint64 {
	if m.Buffer == nil {
		return 0
	}
	return m.Address()
}

// Bytes is memory of a GPU that is no tensor.
type Bytes struct {
	Buffer *cuda.Buffer
	Offset int64 // the address must be a multiple of 16
}

// Address is that of the first byte.
func (b *Bytes) Address() uint64 { return b.Buffer.Address() + uint64(b.Offset) }

// Check reports whether b is memory of so many elements of some bytes each.
func (b *Bytes) Check(op, name string, elements, size int) error {
	switch {
	case b.Buffer == nil:
		return Errorf(op, attn.ErrShape, "%s has no buffer", name)
	case b.Offset < 0 || b.Offset > b.Buffer.Len() || int64(elements) > (b.Buffer.Len()-b.Offset)/int64(size):
		return Errorf(op, attn.ErrShape, "%s has %d elements of %d bytes at byte %d of a buffer of %d bytes", name, elements, size, b.Offset, b.Buffer.Len())
	case b.Address()%16 != 0:
		return Errorf(op, attn.ErrShape, "%s is at byte %d of its buffer; kernels need a multiple of 16", name, b.Offset)
	}
	return nil
}

// BytesOf is the memory of x, as kernels read it.
func BytesOf[T any](x []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(t)))
}

// Size is how many bytes the elements take.
func (m Memory) Size() int64 { return int64(m.Len) * int64(m.DType.Size()) }
