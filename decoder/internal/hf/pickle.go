package hf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
)

// The values that a pickle can hold here: nil, bool, int64, float64, string,
// pyLong, pyTuple, *pyList, pyDict, pyClass, and what the classes make
// (*storage and *view). Nothing else is ever made, and nothing is executed: a
// class is a name out of a fixed list, and a call of it is a case below.
type (
	pyLong  string // little-endian two's complement, of integers beyond 64 bits
	pyTuple []any
	pyList  struct{ items []any }
	pyDict  map[string]any // every key of a state dict is a string
	pyClass string         // "module.name"
)

// storage is the flat array that one or more tensors are views of.
type storage struct {
	dtype dtype
	key   string
	count int
	data  []byte // in the older layout nil until the pickle has been read
}

// view is a tensor of a storage: element (i, j, ...) lies at
// offset + i*stride[0] + j*stride[1] + ... . Nothing in it has been checked yet.
type view struct {
	storage *storage
	offset  int64
	shape   pyTuple
	stride  pyTuple
}

const (
	classOrderedDict = pyClass("collections.OrderedDict")
	classTensor      = pyClass("torch._utils._rebuild_tensor_v2")
	classParameter   = pyClass("torch._utils._rebuild_parameter")
)

// storageTypes are the classes of storages, and with the three above all the
// classes there are.
var storageTypes = map[pyClass]dtype{
	"torch.FloatStorage": f32, "torch.HalfStorage": f16, "torch.BFloat16Storage": bf16,
	"torch.DoubleStorage": "F64", "torch.LongStorage": "I64", "torch.IntStorage": "I32",
	"torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
}

// unpickler runs one pickle, the instructions of a stack machine (PEP 307 and
// 3154), as far as torch writes them for a dictionary of tensors.
//
// An instruction pushes at most one value, whose size is in proportion to the
// bytes of the instruction or to the values that it takes off the stack: memory
// stays in proportion to the input. The first error is kept, and after it
// instructions have values without meaning.
type unpickler struct {
	data  []byte // from the pickle's first byte on
	pos   int
	stack []any
	marks []int // heights of the stack
	memo  map[uint32]any
	// persistent turns a persistent id into a storage.
	persistent func(id pyTuple) (*storage, error)
	err        error
}

// unpickle returns the pickle's value and its length in bytes.
func unpickle(data []byte, persistent func(pyTuple) (*storage, error)) (value any, length int, err error) {
	u := unpickler{data: data, memo: map[uint32]any{}, persistent: persistent}
	for {
		at := u.pos
		op := byte(u.number(1))
		if op == '.' && u.err == nil { // STOP
			if len(u.stack) == 1 && len(u.marks) == 0 {
				return u.stack[0], u.pos, nil
			}
			u.fail("%d values and %d marks are left at the end, not one value", len(u.stack), len(u.marks))
		}
		if u.err == nil {
			u.step(op)
		}
		if u.err != nil {
			return nil, 0, fmt.Errorf("pickle, byte %d: %w", at, u.err)
		}
	}
}

// step executes one instruction.
func (u *unpickler) step(op byte) {
	switch op {
	case 0x80: // PROTO
		if v := u.number(1); v > 5 {
			u.fail("pickle protocol %d is later than 5", v)
		}
	case 0x95: // FRAME says how much to read ahead, and all is here
		u.take(8)
	case '(': // MARK
		u.marks = append(u.marks, len(u.stack))

	case 'N': // NONE
		u.push(nil)
	case 0x88, 0x89: // NEWTRUE, NEWFALSE
		u.push(op == 0x88)
	case 'K': // BININT1
		u.push(int64(u.number(1)))
	case 'M': // BININT2
		u.push(int64(u.number(2)))
	case 'J': // BININT
		u.push(int64(int32(u.number(4))))
	case 0x8a: // LONG1
		u.push(long(u.take(u.number(1))))
	case 'G': // BINFLOAT
		u.push(math.Float64frombits(bits.ReverseBytes64(u.number(8))))
	case 'U', 0x8c: // SHORT_BINSTRING, SHORT_BINUNICODE
		u.push(string(u.take(u.number(1))))
	case 'T', 'X': // BINSTRING, BINUNICODE
		u.push(string(u.take(u.number(4))))
	case 0x8d: // BINUNICODE8
		u.push(string(u.take(u.number(8))))

	case ')': // EMPTY_TUPLE
		u.push(pyTuple{})
	case 0x85, 0x86, 0x87: // TUPLE1, TUPLE2, TUPLE3
		u.push(pyTuple(slices.Clone(u.pop(int(op-0x85) + 1))))
	case 't': // TUPLE
		u.push(pyTuple(slices.Clone(u.popMark())))
	case ']': // EMPTY_LIST
		u.push(&pyList{})
	case 'a': // APPEND
		u.extend(u.pop(1))
	case 'e': // APPENDS
		u.extend(u.popMark())
	case '}': // EMPTY_DICT
		u.push(pyDict{})
	case 's': // SETITEM
		u.setItems(u.pop(2))
	case 'u': // SETITEMS
		u.setItems(u.popMark())

	case 'q': // BINPUT
		u.memo[uint32(u.number(1))] = u.top()
	case 'r': // LONG_BINPUT
		u.memo[uint32(u.number(4))] = u.top()
	case 0x94: // MEMOIZE
		u.memo[uint32(len(u.memo))] = u.top()
	case 'h': // BINGET
		u.get(uint32(u.number(1)))
	case 'j': // LONG_BINGET
		u.get(uint32(u.number(4)))

	case 'c': // GLOBAL
		module := u.line()
		u.class(module, u.line())
	case 0x93: // STACK_GLOBAL
		v := u.pop(2)
		u.class(v[0], v[1])
	case 'R': // REDUCE
		v := u.pop(2)
		u.call(v[0], v[1])
	case 'b': // BUILD sets attributes, and torch keeps version numbers of modules there
		state := u.pop(1)[0]
		if _, ok := u.top().(pyDict); !ok {
			u.fail("attributes, %s, are set on %s", describe(state), describe(u.top()))
		}
	case 'Q': // BINPERSID
		v := u.pop(1)[0]
		id, ok := v.(pyTuple)
		if !ok {
			u.fail("a persistent id is %s, not a tuple", describe(v))
			return
		}
		s, err := u.persistent(id)
		if err != nil {
			u.fail("%w", err)
		}
		u.push(s)
	default:
		u.fail("instruction 0x%02x has no place in a dictionary of tensors", op)
	}
}

func (u *unpickler) fail(format string, args ...any) {
	if u.err == nil {
		u.err = fmt.Errorf(format, args...)
	}
}

// take returns the next n bytes, nil when they are not there.
func (u *unpickler) take(n uint64) []byte {
	if left := len(u.data) - u.pos; n > uint64(left) {
		u.fail("an instruction needs %d bytes, and there are %d", n, left)
		return nil
	}
	b := u.data[u.pos : u.pos+int(n)]
	u.pos += int(n)
	return b
}

// number reads an unsigned integer of width bytes, little endian.
func (u *unpickler) number(width uint64) uint64 {
	var wide [8]byte
	copy(wide[:], u.take(width))
	return binary.LittleEndian.Uint64(wide[:])
}

func (u *unpickler) line() string {
	n := bytes.IndexByte(u.data[u.pos:], '\n')
	if n < 0 {
		u.fail("a line has no end")
		return ""
	}
	return strings.TrimSuffix(string(u.take(uint64(n)+1)), "\n")
}

// long is a two's complement integer of any length.
func long(b []byte) any {
	if len(b) > 8 {
		return pyLong(b)
	}
	var n uint64
	for i, x := range b {
		n |= uint64(x) << (8 * i)
	}
	unused := 64 - 8*len(b)
	return int64(n<<unused) >> unused
}

func (u *unpickler) push(v any) { u.stack = append(u.stack, v) }

func (u *unpickler) top() any {
	if len(u.stack) == 0 {
		u.fail("an instruction needs a value and there is none")
		return nil
	}
	return u.stack[len(u.stack)-1]
}

// pop takes the last n values, at most down to the last mark. They stay valid
// until the next push.
func (u *unpickler) pop(n int) []any {
	floor := 0
	if len(u.marks) > 0 {
		floor = u.marks[len(u.marks)-1]
	}
	at := len(u.stack) - n
	if at < floor {
		u.fail("an instruction needs %d values and there are %d", n, len(u.stack)-floor)
		return make([]any, n)
	}
	items := u.stack[at:]
	u.stack = u.stack[:at]
	return items
}

// popMark takes the values above the last mark, and the mark. They stay valid
// until the next push.
func (u *unpickler) popMark() []any {
	if len(u.marks) == 0 {
		u.fail("an instruction needs a mark and there is none")
		return nil
	}
	at := u.marks[len(u.marks)-1]
	u.marks = u.marks[:len(u.marks)-1]
	items := u.stack[at:]
	u.stack = u.stack[:at]
	return items
}

func (u *unpickler) get(i uint32) {
	v, ok := u.memo[i]
	if !ok {
		u.fail("value %d is fetched and was never stored", i)
	}
	u.push(v)
}

func (u *unpickler) extend(items []any) {
	list, ok := u.top().(*pyList)
	if !ok {
		u.fail("values, %d in all, are appended to %s", len(items), describe(u.top()))
		return
	}
	list.items = append(list.items, items...)
}

func (u *unpickler) setItems(items []any) {
	dict, ok := u.top().(pyDict)
	if !ok || len(items)%2 != 0 {
		u.fail("keys and values, %d in all, are set in %s", len(items), describe(u.top()))
		return
	}
	for i := 0; i < len(items); i += 2 {
		key, ok := items[i].(string)
		if !ok {
			u.fail("a key is %s, not a string", describe(items[i]))
			return
		}
		if _, ok := dict[key]; ok {
			u.fail("key %s is set twice", quote(key))
			return
		}
		dict[key] = items[i+1]
	}
}

// class pushes a class, if it is one of those that are needed.
func (u *unpickler) class(module, name any) {
	m, ok1 := module.(string)
	n, ok2 := name.(string)
	if !ok1 || !ok2 {
		u.fail("a class is named by %s and %s, not by two strings", describe(module), describe(name))
		return
	}
	c := pyClass(m + "." + n)
	_, isStorage := storageTypes[c]
	if !isStorage && c != classOrderedDict && c != classTensor && c != classParameter {
		u.fail("class %s has no place in a dictionary of tensors", quote(string(c)))
	}
	u.push(c)
}

// call pushes what the class makes of the arguments.
func (u *unpickler) call(class, arguments any) {
	args, ok := arguments.(pyTuple)
	switch class {
	case classOrderedDict:
		if ok && len(args) == 0 {
			u.push(pyDict{})
			return
		}
	case classTensor: // storage, offset, shape, stride, requires_grad, hooks and sometimes metadata
		if len(args) != 6 && len(args) != 7 {
			break
		}
		s, ok1 := args[0].(*storage)
		offset, ok2 := args[1].(int64)
		shape, ok3 := args[2].(pyTuple)
		stride, ok4 := args[3].(pyTuple)
		if ok1 && ok2 && ok3 && ok4 {
			u.push(&view{s, offset, shape, stride})
			return
		}
	case classParameter: // tensor, requires_grad, hooks
		if len(args) == 3 {
			if v, ok := args[0].(*view); ok {
				u.push(v)
				return
			}
		}
	}
	u.fail("%s is called with %s, which does not suit it", describe(class), describe(arguments))
}

// describe names a value for an error. It looks one level deep only: a value
// may contain itself.
func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool, int64, float64:
		return fmt.Sprint(v)
	case string:
		return "the string " + quote(v)
	case pyLong:
		return fmt.Sprintf("an integer of %d bytes", len(v))
	case pyTuple:
		return fmt.Sprintf("a tuple of %d", len(v))
	case *pyList:
		return fmt.Sprintf("a list of %d", len(v.items))
	case pyDict:
		return fmt.Sprintf("a dictionary of %d", len(v))
	case pyClass:
		return "class " + string(v)
	case *storage:
		return fmt.Sprintf("a storage of %d %s", v.count, v.dtype)
	default:
		return "a tensor"
	}
}
