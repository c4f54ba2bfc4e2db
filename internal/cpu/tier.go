package cpu

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// tier is an instruction set that kernels exist for. Each family of kernels has a table by tier; what is
// in use is the table's entry for the tier in use. The other tiers are those of an architecture, from the least
// to the best; there are tiers of them all, with tierNames.
type tier uint8

const tierGo tier = 0 // no assembly

func (t tier) String() string { return tierNames[t] }

// TierVariable is the environment variable that chooses the kernels: "go", and "avx2", "avx512" or "amx" on amd64,
// "neon" on arm64. Without it, or with an empty value, the best ones for the machine are used. It is read when the program starts.
// A value that is none of these, or one that this machine or build has no kernels for, is an error that
// wraps ErrTier, which every call that would use a kernel returns.
const TierVariable = "LEANATTENTION_CPU"

// ErrTier: TierVariable asks for kernels that there are none of.
var ErrTier = errors.New("no such kernels")

// inUse is the tier in use, or why there is none. Tests change it between runs.
var inUse, errInUse = chooseTier(os.Getenv(TierVariable), bestTier())

// chooseTier returns the tier of the given name, best if there is none.
func chooseTier(name string, best tier) (tier, error) {
	if name == "" {
		return best, nil
	}
	for t, n := range tierNames {
		if n == name && tier(t) <= best {
			return tier(t), nil
		}
	}
	return best, fmt.Errorf("leanattention: %s=%s: this machine and build have %s: %w",
		TierVariable, name, strings.Join(tierNames[:best+1], ", "), ErrTier)
}

// Tier returns the name of the kernels in use, and the error of a bad TierVariable.
func Tier() (string, error) { return inUse.String(), errInUse }

// forceTier makes t the tier in use until restore is called. It is for tests; nothing may run meanwhile.
func forceTier(t tier) (restore func()) {
	was, err := inUse, errInUse
	inUse, errInUse = t, nil
	return func() { inUse, errInUse = was, err }
}
