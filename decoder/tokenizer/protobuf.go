package tokenizer

import (
	"encoding/binary"
	"errors"
	"math"
)

// protobuf is the unread rest of a Protocol Buffers message.
type protobuf []byte

var errProtobuf = errors.New("no message of Protocol Buffers")

// field is a field of a message. The value is an integer or bytes.
type field struct {
	number int
	value  uint64
	data   protobuf
	bytes  bool
}

// next consumes the next field.
func (p *protobuf) next() (f field, err error) {
	key, n := binary.Uvarint(*p)
	if n <= 0 || key>>3 == 0 || key>>3 > 1<<29 {
		return f, errProtobuf
	}
	*p = (*p)[n:]
	f.number = int(key >> 3)
	switch key & 7 {
	case 0:
		v, n := binary.Uvarint(*p)
		if n <= 0 {
			return f, errProtobuf
		}
		f.value, *p = v, (*p)[n:]
	case 1:
		if len(*p) < 8 {
			return f, errProtobuf
		}
		f.value, *p = binary.LittleEndian.Uint64(*p), (*p)[8:]
	case 2:
		size, n := binary.Uvarint(*p)
		if n <= 0 || size > uint64(len(*p)-n) {
			return f, errProtobuf
		}
		f.data, f.bytes, *p = (*p)[n:n+int(size)], true, (*p)[n+int(size):]
	case 5:
		if len(*p) < 4 {
			return f, errProtobuf
		}
		f.value, *p = uint64(binary.LittleEndian.Uint32(*p)), (*p)[4:]
	default:
		return f, errProtobuf
	}
	return f, nil
}

// each calls yield with each field.
func (p protobuf) each(yield func(field) error) error {
	for len(p) > 0 {
		f, err := p.next()
		if err != nil {
			return err
		}
		if err := yield(f); err != nil {
			return err
		}
	}
	return nil
}

func (f field) float() float32 { return math.Float32frombits(uint32(f.value)) }

func (f field) int() int { return int(int32(f.value)) }

func (f field) bool() bool { return f.value != 0 }
