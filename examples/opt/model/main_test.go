package model

import (
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

func TestMain(m *testing.M) { reftest.Main(m) }
