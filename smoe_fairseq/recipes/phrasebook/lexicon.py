"""Names, adjectives, places and times, one row each, and the door to the whole lexicon."""

from smoe_fairseq.recipes.phrasebook.entries import Adjective, Name, Place, Time, read
from smoe_fairseq.recipes.phrasebook.nouns import NOUNS
from smoe_fairseq.recipes.phrasebook.verbs import VERBS

__all__ = ["ADJECTIVES", "NAMES", "NOUNS", "PLACES", "TIMES", "VERBS"]

NAMES: dict[str, Name] = read(  # English, grammatical gender
    """
    Maria f
    Anna f
    Aminah f
    Lerato f
    Thabo m
    Pau m
    Ahmad m
    Ramon m
    """,
    Name,
)

# English; Northern Sotho stem, and its form in class 9 (-: joined by the possessive concord);
# Malay; Tagalog; Catalan masculine, feminine and their plurals; kinds of nouns it goes with.
ADJECTIVES: dict[str, Adjective] = read(
    """
    big golo kgolo besar malaki gran,gran,grans,grans  animal,thing,building,plant,fruit
    small nnyane nnyane kecil maliit petit,petita,petits,petites  animal,thing,plant,fruit,building
    black so ntsho        hitam  itim      negre,negra,negres,negres  animal,thing
    white šweu tšhweu     putih  puti      blanc,blanca,blancs,blanques  animal,thing,building
    red hubedu khubedu    merah  pula      vermell,vermella,vermells,vermelles  thing,opening,fruit
    green tala tala       hijau  berde     verd,verda,verds,verdes  thing,opening,fruit
    new swa mpsha         baharu bago      nou,nova,nous,noves  thing,building,opening
    old kgale -           lama   luma      vell,vella,vells,velles  thing,building,opening
    expensive go_tura -   mahal  mahal     car,cara,cars,cares  thing
    beautiful botse botse cantik maganda   bonic,bonica,bonics,boniques  thing,building,plant
    tall telele telele    tinggi matangkad alt,alta,alts,altes  person
    short kopana kopana   rendah pandak    baix,baixa,baixos,baixes  person
    strong go_tia -       kuat   malakas   fort,forta,forts,fortes  person,animal
    """,
    Adjective,
)

# English; Northern Sotho; Malay; Tagalog; Catalan preposition, noun and gender (-: no article).
PLACES: dict[str, Place] = read(
    """
    home at_home               gae          di_rumah          sa_bahay      a casa -
    school at_school           sekolong     di_sekolah        sa_paaralan   a escola f
    market at_the_market       mmarakeng    di_pasar          sa_palengke   a mercat m
    church at_church           kerekeng     di_gereja         sa_simbahan   a església f
    garden in_the_garden       serapaneng   di_taman          sa_hardin     a jardí m
    kitchen in_the_kitchen     ka_khitšhing di_dapur          sa_kusina     a cuina f
    town in_town               toropong     di_bandar         sa_bayan      a ciutat f
    hospital at_the_hospital   sepetlele    di_hospital       sa_ospital    a hospital m
    river near_the_river       kgauswi_le_noka berhampiran_sungai malapit_sa_ilog a_prop_de riu m
    tree under_the_tree        ka_tlase_ga_mohlare di_bawah_pokok sa_ilalim_ng_puno sota arbre m
    """,
    Place,
)

TIMES: dict[str, Time] = read(  # English, Northern Sotho, Malay, Tagalog, Catalan, tense
    """
    now        bjale            sekarang    ngayon                  ara                  present
    yesterday  maabane          semalam     kahapon                 ahir                 past
    last_week  beke_ye_e_fetilego minggu_lepas noong_nakaraang_linggo la_setmana_passada past
    last_year  ngwaga_wo_o_fetilego tahun_lepas noong_nakaraang_taon l'any_passat        past
    tomorrow   gosasa           esok        bukas                   demà                 future
    next_week  beke_ye_e_tlago  minggu_depan sa_susunod_na_linggo   la_setmana_que_ve    future
    next_year  ngwaga_wo_o_tlago tahun_depan sa_susunod_na_taon     l'any_que_ve         future
    """,
    Time,
)
