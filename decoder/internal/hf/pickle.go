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

// A pickle can have values of these types: nil, bool, int64, float64, string, pyLong, pyTuple, *pyList, pyDict,
// pyClass, *storage and *view. The last two are the results of calling a class.
//
// No other values are created, and no code of a pickle is executed. A class is a name from a fixed list. The method
// call implements each class.
type (
	pyLong  string // little-endian two's complement, for integers of more than 64 bits
	pyTuple []any
	pyList  struct{ items []any }
	pyDict  map[string]any // every key of a state dict is a string
	pyClass string         // "module.name"
)

// storage is a flat array. One or more tensors are views of a storage.
type storage struct {
	dtype dtype
	key   string
	count int
	data  []byte // nil in the older layout, until the pickle has been read
}

// view is a tensor in a storage. Element (i, j, ...) is element offset + i*stride[0] + j*stride[1] + ... of the
// storage. The fields are unchecked until the method entry checks them.
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

// storageTypes are the classes of storages. A pickle can use no other classes than storageTypes and the three classes
// above.
var storageTypes = map[pyClass]dtype{
	"torch.FloatStorage": f32, "torch.HalfStorage": f16, "torch.BFloat16Storage": bf16,
	"torch.DoubleStorage": "F64", "torch.LongStorage": "I64", "torch.IntStorage": "I32",
	"torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
}

// unpickler runs one pickle: the instructions of a stack machine (PEP 307 and PEP 3154). It supports only the
// instructions that torch writes for a dictionary of tensors.
//
// An instruction pushes at most one value. The size of the value is proportional to the size of the instruction, or to
// the size of the values that the instruction pops. Memory is therefore proportional to the input.
//
// The unpickler keeps the first error. After an error, the values on the stack are meaningless.
type unpickler struct {
	data  []byte // the rest of the file, from the start of the pickle
	pos   int
	stack []any
	marks []int // stack heights at the marks
	memo  map[uint32]any
	// persistent returns the storage of a persistent id.
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
	case 0x95: // FRAME gives the length to read ahead, which is not needed here
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
	case 'b': // BUILD sets attributes; torch uses it for the version numbers of modules
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

// take returns the next n bytes, or nil if there are fewer.
func (u *unpickler) take(n uint64) []byte {
	if left := len(u.data) - u.pos; n > uint64(left) {
		u.fail("an instruction needs %d bytes, and there are %d", n, left)
		return nil
	}
	b := u.data[u.pos : u.pos+int(n)]
	u.pos += int(n)
	return b
}

// number reads a little-endian unsigned integer of width bytes.
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

// long decodes a two's complement integer of any length.
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

// pop pops the last n values, at most down to the last mark. The slice is valid until the next push.
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

// popMark pops the last mark and the values above it. The slice is valid until the next push.
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

// class pushes a class. The class must be one of the supported classes.
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

// call pushes the result of calling a class.
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

// describe formats a value for an error. It formats one level only, because a value may contain itself.
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
